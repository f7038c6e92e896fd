// SPDX-License-Identifier: BSD-3-Clause
// trueshard::sgd_, adam_ and adamw_: one pass over memory per step. The bits are those of kernels/, which equal
// torch.optim's wherever plugin/optim/fused_step.h finds them equal (tests/python/operators_test.py compares).
#include <optional>

#include <ATen/Functions.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "plugin/engine/parallel.h"
#include "registration/operator_checks.h"

namespace trueshard::registration {
namespace {

// libtorch's own square root: its vector math library is not always correctly rounded.
void torch_sqrt(float* data, int64_t count) {
  const at::NoGradGuard no_grad;
  at::from_blob(data, {count}, at::TensorOptions().dtype(c10::kFloat)).sqrt_();
}

bool vector_fma() { return at::get_cpu_capability() != "DEFAULT"; }

kernels::GradientFactors factors_of(const std::optional<at::Tensor>& grad_scale) {
  kernels::GradientFactors factors;
  if (!grad_scale.has_value() || !grad_scale->defined()) return factors;
  factors.unscale = true;
  factors.inverse_scale = static_cast<float>(1.0 / grad_scale->item<double>());
  return factors;
}

bool skipped(const std::optional<at::Tensor>& found_inf) {
  return found_inf.has_value() && found_inf->defined() && found_inf->item<double>() != 0.0;
}

float* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<float>() : nullptr; }
float* moved(float* data, int64_t begin) { return data == nullptr ? nullptr : data + begin; }

void sgd(const at::Tensor& parameter, const at::Tensor& gradient, const std::optional<at::Tensor>& momentum_buffer,
         double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool first_step,
         const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  const at::Tensor buffer = momentum_buffer.value_or(at::Tensor());
  check_step({"sgd_", parameter, gradient, {buffer}});
  TORCH_CHECK(momentum == 0.0 || buffer.defined(), "trueshard::sgd_: momentum is ", momentum,
              " and no momentum_buffer was given, expected a float32 tensor of the parameter's size");
  if (skipped(found_inf)) return;
  kernels::SgdCall call{};
  call.count = parameter.numel();
  call.parameter = data_of(parameter);
  call.gradient = gradient.const_data_ptr<float>();
  call.momentum_buffer = momentum == 0.0 ? nullptr : data_of(buffer);
  call.first_step = first_step;
  call.factors = factors_of(grad_scale);
  call.lr = lr;
  call.momentum = momentum;
  call.dampening = dampening;
  call.weight_decay = weight_decay;
  call.nesterov = nesterov;
  call.vector_fma = vector_fma();
  engine::for_blocks(call.count, [&](int64_t begin, int64_t end) {
    kernels::SgdCall part = call;
    part.count = end - begin;
    part.parameter += begin;
    part.gradient += begin;
    part.momentum_buffer = moved(call.momentum_buffer, begin);
    kernels::kernels().sgd(part);
  });
}

void adam_step(const kernels::AdamCall& call) {
  engine::for_blocks(call.count, [&](int64_t begin, int64_t end) {
    kernels::AdamCall part = call;
    part.count = end - begin;
    part.parameter += begin;
    part.gradient += begin;
    part.exp_avg += begin;
    part.exp_avg_sq += begin;
    part.max_exp_avg_sq = moved(call.max_exp_avg_sq, begin);
    kernels::kernels().adam(part);
  });
}

template <bool kDecoupled>
void adam(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg,
          const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& max_exp_avg_sq, const at::Tensor& step,
          double lr, double beta1, double beta2, double eps, double weight_decay,
          const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  const at::Tensor most = max_exp_avg_sq.value_or(at::Tensor());
  check_step({kDecoupled ? "adamw_" : "adam_", parameter, gradient, {exp_avg, exp_avg_sq, most}, step});
  if (skipped(found_inf)) return;
  step.add_(1);
  kernels::AdamCall call{};
  call.count = parameter.numel();
  call.parameter = data_of(parameter);
  call.gradient = gradient.const_data_ptr<float>();
  call.exp_avg = data_of(exp_avg);
  call.exp_avg_sq = data_of(exp_avg_sq);
  call.max_exp_avg_sq = data_of(most);
  call.factors = factors_of(grad_scale);
  call.decoupled = kDecoupled;
  call.lr = lr;
  call.beta1 = beta1;
  call.beta2 = beta2;
  call.eps = eps;
  call.weight_decay = weight_decay;
  call.step = static_cast<int64_t>(step.item<float>());
  call.sqrt = torch_sqrt;
  call.vector_fma = vector_fma();
  adam_step(call);
}

}  // namespace

TORCH_LIBRARY_IMPL(trueshard, CPU, library) {
  library.impl("sgd_", &sgd);
  library.impl("adam_", &adam<false>);
  library.impl("adamw_", &adam<true>);
}

}  // namespace trueshard::registration
