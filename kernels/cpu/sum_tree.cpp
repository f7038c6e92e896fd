// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/sum_tree_machine.h"
#if TRUESHARD_CPU_LEVEL > 0  // rows of the plain build are loops, which the templates over leaves would multiply
#include "kernels/cpu/sum_tree_whole.h"
#endif

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

template <class Number>
Finish<Number> finish_of(const SumTreeCall& call, const Division<Number>& division) {
  const SumEpilogue& epilogue = call.epilogue;
  return {division,           static_cast<const Number*>(epilogue.base),
          epilogue.nonfinite, epilogue.square_sums,
          call.outputs[0],    call.output_dtype};
}

}  // namespace

void sum_tree(const SumTreeCall& call) {
  if (call.count == 0 || call.step_count == 0) return;
  if (call.accumulate_fp64) {
    run_machine(call, finish_of(call, double_division(call.epilogue)));
    return;
  }
  const Finish<float> finish = finish_of(call, float_division(call.epilogue));
#if TRUESHARD_CPU_LEVEL > 0
  if (run_whole_tree(match_whole_tree(call), finish, call.count)) return;
#endif
  run_machine(call, finish);
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
