// SPDX-License-Identifier: BSD-3-Clause
#include "registration/sum_operators.h"

#include <array>
#include <vector>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "plugin/engine/parallel.h"
#include "plugin/plan/sum_tree_plan.h"

namespace trueshard::registration {

at::Tensor sum_leaves(at::TensorList leaves, double divisor, std::optional<c10::ScalarType> dtype) {
  const c10::ScalarType result_dtype = check_leaves(leaves, divisor, dtype);
  const bool fp64 = sum_dtype(leaves[0].scalar_type()) == c10::kDouble;
  const plan::SumProgram program = plan::whole_program(std::vector<bool>(leaves.size(), true));
  std::vector<at::Tensor> dense;  // row-major, whatever the strides were
  for (const at::Tensor& leaf : leaves) dense.push_back(leaf.contiguous());
  at::Tensor result = at::empty(leaves[0].sizes(), leaves[0].options().dtype(result_dtype));

  kernels::SumTreeCall call{};
  call.steps = program.steps.data();
  call.step_count = static_cast<int>(program.steps.size());
  call.accumulate_fp64 = fp64;
  call.output_dtype = kernel_dtype("sum_leaves", result_dtype);
  call.epilogue.divide = divisor != 1.0;
  call.epilogue.divisor = fp64 ? divisor : static_cast<double>(static_cast<float>(divisor));
  engine::for_blocks(result.numel(), [&](int64_t begin, int64_t end) {
    std::array<kernels::Operand, 256> operands;
    for (size_t i = 0; i < program.operands.size(); ++i) {
      const at::Tensor& leaf = dense[program.operands[i].index];
      const kernels::DType type = kernel_dtype("sum_leaves", leaf.scalar_type());
      operands[i] = {static_cast<const std::byte*>(leaf.const_data_ptr()) + begin * kernels::itemsize(type), type};
    }
    void* outputs[1] = {static_cast<std::byte*>(result.data_ptr()) + begin * kernels::itemsize(call.output_dtype)};
    kernels::SumTreeCall part = call;
    part.operands = operands.data();
    part.outputs = outputs;
    part.count = end - begin;
    kernels::kernels().sum_tree(part);
  });
  return result;
}

// For every device, because a call without tensors has none; the checks refuse what is not on cpu.
TORCH_LIBRARY_IMPL(trueshard, CompositeExplicitAutograd, library) { library.impl("sum_leaves", &sum_leaves); }

}  // namespace trueshard::registration
