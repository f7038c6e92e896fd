// SPDX-License-Identifier: BSD-3-Clause
// Role: trueshard::sum_leaves, for the kernels of other operators. Invariants, Shapes, Errors: as in schemas.cpp.
// Threads: any.
#pragma once
#include "registration/operator_checks.h"

namespace trueshard::registration {

at::Tensor sum_leaves(at::TensorList leaves, double divisor, std::optional<c10::ScalarType> dtype);

}  // namespace trueshard::registration
