// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/optim/scale_loss.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/pass_scale.h"

namespace trueshard::optim {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ScaleLoss : torch::autograd::Function<ScaleLoss> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& loss, double scale) {
    context->saved_data["scale"] = scale;
    context->saved_data["dtype"] = static_cast<int64_t>(loss.scalar_type());
    const auto wide = engine::is_16bit(loss.scalar_type()) ? loss.to(c10::kFloat) : loss;
    return wide.mul(scale);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const double scale = context->saved_data["scale"].toDouble();
    engine::mark_pass(scale);
    const auto dtype = static_cast<c10::ScalarType>(context->saved_data["dtype"].toInt());
    return {gradients[0].mul(scale).to(dtype), at::Tensor()};
  }
};

}  // namespace

at::Tensor scale_loss(const at::Tensor& loss, double scale) { return ScaleLoss::apply(loss, scale); }

}  // namespace trueshard::optim
