// SPDX-License-Identifier: BSD-3-Clause
// Role: loss * scale as an autograd node that marks its backward pass with the scale (engine/pass_scale.h).
// Shapes: any; the result is fp32 for 16-bit losses, else the loss's dtype. Errors: none of its own.
#pragma once
#include <ATen/core/Tensor.h>

namespace trueshard::optim {

at::Tensor scale_loss(const at::Tensor& loss, double scale);

}  // namespace trueshard::optim
