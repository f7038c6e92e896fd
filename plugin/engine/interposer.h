// SPDX-License-Identifier: BSD-3-Clause
// Role: sees every operator that touches a managed parameter or a view of it, forward and backward, eager and
// TorchScript, and keeps its unit whole while the operator runs. How: managed tensors carry one dispatch key that no
// part of libtorch uses; its fallback pins, redispatches, unpins. The key is inherited by views and by tensors that
// autograd saves, not by results. Operators on other tensors pay nothing. Invariants: I1 the key lies above autocast
// and autograd: a parameter is whole before anything looks at it. I2 pins are released when an operator throws.
// Threads: any. Errors: install() when another library owns the key; the operator's own; those of pin().
#pragma once
#include <ATen/core/Tensor.h>

namespace trueshard::engine {

void install_interposer();  // once per process; cheap afterwards
void watch(const at::Tensor& tensor);
bool is_watched(const at::Tensor& tensor);

}  // namespace trueshard::engine
