// SPDX-License-Identifier: BSD-3-Clause
// Role: what the operators' kernels for CPU and Meta check alike, so that a wrong call is the same error under both.
// Shapes: as in schemas.cpp. Threads: pure functions. Errors: c10::Error that names the operator, what it got and
// expected.
#pragma once
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "kernels/kernels.h"

namespace trueshard::registration {

kernels::DType kernel_dtype(const char* op, c10::ScalarType dtype);
void check_device(const char* op, const at::Tensor& tensor);  // cpu, or no data at all
// What a sum of leaves of this dtype is kept in: fp32, or fp64 for fp64.
c10::ScalarType sum_dtype(c10::ScalarType dtype);
c10::ScalarType check_leaves(at::TensorList leaves, double divisor, std::optional<c10::ScalarType> dtype);

enum class GroupReduction { kSum, kAverage };
GroupReduction check_reduction(const std::string& op);
// The rows of one rank's part.
int64_t check_rows(const char* op, const at::Tensor& input, int64_t ranks);
void check_gradients(const char* op, at::TensorList gradients);
void check_max_norm(double max_norm);
void check_norm_type(double norm_type);

struct StepTensors {  // parameter, gradient and state of one fused step; undefined: not used
  const char* op;
  const at::Tensor& parameter;
  const at::Tensor& gradient;
  std::initializer_list<at::Tensor> states;
  at::Tensor step{};  // Adam only
};
void check_step(const StepTensors& tensors);

}  // namespace trueshard::registration
