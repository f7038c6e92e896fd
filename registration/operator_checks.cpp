// SPDX-License-Identifier: BSD-3-Clause
#include "registration/operator_checks.h"

#include <cmath>

#include <c10/util/Exception.h>

#include "plugin/comm/names.h"
#include "plugin/engine/dtypes.h"

namespace trueshard::registration {

kernels::DType kernel_dtype(const char* op, c10::ScalarType dtype) {
  TORCH_CHECK(engine::is_reducible(dtype), "trueshard::", op, ": a tensor is ", comm::dtype_name(dtype),
              ", expected float32, float64, bfloat16 or float16");
  return engine::kernel_dtype(dtype);
}

void check_device(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu() || tensor.device().is_meta(), "trueshard::", op, ": a tensor is on ",
              tensor.device(), ", expected cpu; this version has kernels for cpu");
}

c10::ScalarType sum_dtype(c10::ScalarType dtype) { return engine::master_dtype_of(dtype); }

c10::ScalarType check_leaves(at::TensorList leaves, double divisor, std::optional<c10::ScalarType> dtype) {
  TORCH_CHECK(!leaves.empty() && leaves.size() <= 255, "trueshard::sum_leaves: got ", leaves.size(),
              " leaves, expected 1 to 255");
  TORCH_CHECK(std::isfinite(divisor) && divisor != 0.0, "trueshard::sum_leaves: divisor is ", divisor,
              ", expected a finite number that is not 0");
  const c10::ScalarType sum = sum_dtype(leaves[0].scalar_type());
  for (size_t i = 0; i < leaves.size(); ++i) {
    kernel_dtype("sum_leaves", leaves[i].scalar_type());
    check_device("sum_leaves", leaves[i]);
    TORCH_CHECK(leaves[i].sizes() == leaves[0].sizes() && sum_dtype(leaves[i].scalar_type()) == sum,
                "trueshard::sum_leaves: leaf ", i, " is ", comm::dtype_name(leaves[i].scalar_type()), " of size ",
                leaves[i].sizes(), " and leaf 0 is ", comm::dtype_name(leaves[0].scalar_type()), " of size ",
                leaves[0].sizes(), "; sizes must be alike, and float64 stands alone");
  }
  const c10::ScalarType result = dtype.value_or(sum);
  TORCH_CHECK(result == sum || (sum == c10::kFloat && (result == c10::kBFloat16 || result == c10::kHalf)),
              "trueshard::sum_leaves: dtype is ", comm::dtype_name(result), ", expected ", comm::dtype_name(sum),
              sum == c10::kFloat ? ", bfloat16 or float16" : "");
  return result;
}

GroupReduction check_reduction(const std::string& op) {
  TORCH_CHECK(op == "sum" || op == "avg", "trueshard::reduce_scatter: op is '", op, "', expected 'sum' or 'avg'");
  return op == "sum" ? GroupReduction::kSum : GroupReduction::kAverage;
}

int64_t check_rows(const char* op, const at::Tensor& input, int64_t ranks) {
  TORCH_CHECK(input.dim() >= 1 && input.size(0) % ranks == 0, "trueshard::", op, ": the input has size ", input.sizes(),
              ", expected rows (dimension 0) in a multiple of the group's ", ranks, " ranks");
  return input.size(0) / ranks;
}

void check_gradients(const char* op, at::TensorList gradients) {
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(gradient.defined(), "trueshard::", op, ": a gradient is undefined; leave it out of the list");
    kernel_dtype(op, gradient.scalar_type());
    check_device(op, gradient);
  }
}

void check_max_norm(double max_norm) {
  TORCH_CHECK(max_norm >= 0.0, "trueshard::clip_grads_with_norm_: max_norm is ", max_norm, ", expected 0 or more");
}

void check_norm_type(double norm_type) {
  TORCH_CHECK(norm_type > 0.0, "trueshard::get_total_norm: norm_type is ", norm_type,
              ", expected a positive number or infinity");
}

void check_step(const StepTensors& tensors) {
  const auto check = [&](const at::Tensor& tensor, const char* what) {
    check_device(tensors.op, tensor);
    TORCH_CHECK(
        tensor.scalar_type() == c10::kFloat && tensor.is_contiguous() && tensor.sizes() == tensors.parameter.sizes(),
        "trueshard::", tensors.op, ": the ", what, " is ", comm::dtype_name(tensor.scalar_type()), " of size ",
        tensor.sizes(), tensor.is_contiguous() ? "" : " (strided)", ", expected a contiguous float32 tensor of size ",
        tensors.parameter.sizes());
  };
  check(tensors.parameter, "parameter");
  check(tensors.gradient, "gradient");
  for (const at::Tensor& state : tensors.states) {
    if (state.defined()) check(state, "state");
  }
  if (!tensors.step.defined()) return;
  TORCH_CHECK(tensors.step.numel() == 1 && tensors.step.scalar_type() == c10::kFloat, "trueshard::", tensors.op,
              ": the step count has size ", tensors.step.sizes(), " and dtype ",
              comm::dtype_name(tensors.step.scalar_type()), ", expected one float32 number");
}

}  // namespace trueshard::registration
