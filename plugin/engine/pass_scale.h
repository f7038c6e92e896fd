// SPDX-License-Identifier: BSD-3-Clause
// Role: tells a backward pass by which factor its loss was multiplied. ShardedGradScaler::scale() puts a node into the
// graph whose backward calls mark_pass(); gradient hooks of the same backward then ask current_pass_scale().
// Invariants: a mark lives exactly as long as its backward (also when that ends by an exception).
// Threads: marks belong to the thread that runs the backward. Errors: none.
#pragma once

namespace trueshard::engine {

void mark_pass(double scale);  // inside a backward only
double current_pass_scale();   // 0: no mark

}  // namespace trueshard::engine
