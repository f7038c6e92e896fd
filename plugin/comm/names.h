// SPDX-License-Identifier: BSD-3-Clause
// Role: how element types and reductions are written in errors and traces: "float32", "sum".
// Threads: pure functions. Errors: none; an unknown number is written as one.
#pragma once
#include <string>

#include <c10/core/ScalarType.h>

namespace trueshard::comm {

std::string dtype_name(c10::ScalarType dtype);
// `reduction` as c10d::ReduceOp::RedOpType counts.
std::string reduction_name(int reduction);

}  // namespace trueshard::comm
