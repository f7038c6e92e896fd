// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "kernels/reference/formats.h"

namespace trueshard::kernels::reference {
namespace {

struct ElementOutputs {
  double values[256];  // by output index
};

// Runs the program on one element. Sums are rounded to the accumulation type after each addition; doubles carry fp32
// values exactly.
void run_program(const SumTreeCall& call, int64_t element, ElementOutputs* outputs) {
  double stack[kMaxSumStack];
  int depth = 0;
  for (int s = 0; s < call.step_count; ++s) {
    const SumStep step = call.steps[s];
    if (step.kind == SumStep::Kind::kLoad) {
      stack[depth++] = load(call.operands[step.index].data, call.operands[step.index].dtype, element);
    } else if (step.kind == SumStep::Kind::kAdd) {
      --depth;
      const double a = stack[depth - 1], b = stack[depth];
      stack[depth - 1] = call.accumulate_fp64 ? a + b : static_cast<float>(a) + static_cast<float>(b);
    } else {
      outputs->values[step.index] = stack[--depth];
    }
  }
}

double finish(const SumTreeCall& call, int64_t element, double value) {
  const SumEpilogue& epilogue = call.epilogue;
  if (call.accumulate_fp64) {
    if (epilogue.divide) value = value / epilogue.divisor;
    if (epilogue.base != nullptr) value = static_cast<const double*>(epilogue.base)[element] + value;
  } else {
    float rounded = static_cast<float>(value);
    if (epilogue.divide) rounded = rounded / static_cast<float>(epilogue.divisor);
    if (epilogue.base != nullptr) rounded = static_cast<const float*>(epilogue.base)[element] + rounded;
    value = rounded;
  }
  if (epilogue.nonfinite != nullptr && !std::isfinite(value)) *epilogue.nonfinite = 1;
  return value;
}

}  // namespace

void sum_tree(const SumTreeCall& call) {
  const DType accumulation = call.accumulate_fp64 ? DType::kFloat64 : DType::kFloat32;
  for (int64_t begin = 0; begin < call.count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, call.count);
    double squares[kBlock];
    for (int64_t i = begin; i < end; ++i) {
      ElementOutputs outputs;
      run_program(call, i, &outputs);
      // All operands of the element have been read: the outputs may lie on top of them.
      for (int s = 0; s < call.step_count; ++s) {
        if (call.steps[s].kind != SumStep::Kind::kStore) continue;
        const int o = call.steps[s].index;
        const double value = o == 0 ? finish(call, i, outputs.values[o]) : outputs.values[o];
        if (o == 0) squares[i - begin] = value * value;
        store(call.outputs[o], o == 0 ? call.output_dtype : accumulation, i, value);
      }
    }
    if (call.epilogue.square_sums != nullptr)
      call.epilogue.square_sums[begin / kBlock] = block_sum(squares, end - begin);
  }
}

}  // namespace trueshard::kernels::reference
