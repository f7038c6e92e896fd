// SPDX-License-Identifier: BSD-3-Clause
// Role: what the operators on gradients share with the class for TorchScript. Invariants, Shapes: as in schemas.cpp.
// Threads: one at a time per group. Errors: c10::Error; communication errors of the group.
#pragma once
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace trueshard::registration {

// gradient *= inverse_scale; whether an element was inf or NaN before.
bool unscale_one(const at::Tensor& gradient, double inverse_scale);
// Collective: the norm over the gradients of all ranks, the same bits on all.
double agreed_norm(c10d::ProcessGroup& group, const std::vector<at::Tensor>& gradients, double norm_type);

}  // namespace trueshard::registration
