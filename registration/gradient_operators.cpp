// SPDX-License-Identifier: BSD-3-Clause
// trueshard::unscale_and_check_, agree_, get_total_norm and clip_grads_with_norm_.
#include "registration/gradient_operators.h"

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "plugin/comm/names.h"
#include "plugin/engine/parallel.h"
#include "registration/group_operators.h"
#include "registration/operator_checks.h"

namespace trueshard::registration {
namespace {

// Calls function(data, dtype, count) over pieces of the gradient's elements, in row-major order; writes back to strided
// ones.
template <class Function>
void visit(const char* op, const at::Tensor& gradient, const Function& function) {
  const at::Tensor dense = gradient.contiguous();
  const kernels::DType dtype = kernel_dtype(op, dense.scalar_type());
  auto* data = static_cast<std::byte*>(dense.data_ptr());
  engine::for_blocks(dense.numel(), [&](int64_t begin, int64_t end) {
    function(data + begin * kernels::itemsize(dtype), dtype, end - begin);
  });
  if (!dense.is_same(gradient)) gradient.copy_(dense);
}

double tree(const double* values, int64_t count) {
  if (count == 1) return values[0];
  int64_t half = 1;
  while (half * 2 < count) half *= 2;
  return tree(values, half) + tree(values + half, count - half);
}

// |x|^p over the elements is `sum` times `unit`^p. unit is a power of two (or the sum is not finite and it is 1).
struct PartialNorm {
  double sum = 0.0, unit = 1.0;
};

std::vector<double> block_values(const at::Tensor& gradient, kernels::NormCall call) {
  const at::Tensor wide = gradient.to(sum_dtype(gradient.scalar_type())).contiguous();
  std::vector<double> values(static_cast<size_t>((wide.numel() + kernels::kBlock - 1) / kernels::kBlock));
  call.dtype = kernel_dtype("get_total_norm", wide.scalar_type());
  const auto* data = static_cast<const std::byte*>(wide.const_data_ptr());
  engine::for_blocks(wide.numel(), [&](int64_t begin, int64_t end) {
    kernels::NormCall part = call;
    part.data = data + begin * kernels::itemsize(call.dtype);
    part.count = end - begin;
    part.block_values = values.data() + begin / kernels::kBlock;
    kernels::kernels().norm_blocks(part);
  });
  return values;
}

double largest(const std::vector<at::Tensor>& gradients) {
  double most = 0.0;
  for (const at::Tensor& gradient : gradients) {
    for (const double value : block_values(gradient, {kernels::NormKind::kMaximum, nullptr, {}, 0, nullptr}))
      most = std::isnan(most) || std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : std::max(most, value);
  }
  return most;
}

PartialNorm partial_norm(const std::vector<at::Tensor>& gradients, double power) {
  PartialNorm partial;
  const double most = largest(gradients);
  if (std::isinf(power) || !std::isfinite(most) || most == 0.0) return {most, 1.0};
  partial.unit = std::ldexp(1.0, std::ilogb(most));
  kernels::NormCall call{kernels::NormKind::kPower, nullptr, {}, 0, nullptr};
  call.scale = 1.0 / partial.unit;
  call.power = power;
  if (power == 2.0) call.kind = kernels::NormKind::kSquare;
  std::vector<double> sums;
  for (const at::Tensor& gradient : gradients) {
    const std::vector<double> values = block_values(gradient, call);
    if (!values.empty()) sums.push_back(tree(values.data(), static_cast<int64_t>(values.size())));
  }
  partial.sum = tree(sums.data(), static_cast<int64_t>(sums.size()));
  return partial;
}

// The same on every rank: from the numbers of all, in their order.
double whole_norm(const std::vector<PartialNorm>& partials, double power) {
  double unit = 0.0, most = 0.0;
  for (const PartialNorm& partial : partials) {
    if (std::isnan(partial.sum)) return partial.sum;
    most = std::max(most, partial.sum);
    if (partial.sum > 0.0) unit = std::max(unit, partial.unit);
  }
  if (std::isinf(power) || std::isinf(most) || most == 0.0) return most;
  std::vector<double> sums;
  for (const PartialNorm& partial : partials)
    sums.push_back(partial.sum == 0.0 ? 0.0 : partial.sum * std::pow(partial.unit / unit, power));
  const double sum = tree(sums.data(), static_cast<int64_t>(sums.size()));
  return unit * (power == 2.0 ? std::sqrt(sum) : std::pow(sum, 1.0 / power));
}

void check_flag(const char* op, const at::Tensor& found_inf) {
  TORCH_CHECK(found_inf.numel() == 1 && found_inf.scalar_type() == c10::kFloat, "trueshard::", op,
              ": found_inf has size ", found_inf.sizes(), " and dtype ", comm::dtype_name(found_inf.scalar_type()),
              ", expected one float32 number");
}

void unscale_and_check(const at::Tensor& gradient, const at::Tensor& inverse_scale, const at::Tensor& found_inf) {
  check_gradients("unscale_and_check_", {gradient});
  check_flag("unscale_and_check_", found_inf);
  TORCH_CHECK(inverse_scale.numel() == 1, "trueshard::unscale_and_check_: inverse_scale has size ",
              inverse_scale.sizes(), ", expected one number");
  if (unscale_one(gradient, inverse_scale.item<double>())) found_inf.fill_(1.0);
}

void agree(const at::Tensor& found_inf, const std::string& group_name) {
  check_flag("agree_", found_inf);
  const auto group = group_named("agree_", group_name);
  const at::Tensor all = gather_numbers(*group, found_inf.ne(0).to(at::kFloat).reshape({1}));
  if (all.max().item<float>() != 0.0f) found_inf.fill_(1.0);
}

at::Tensor get_total_norm(at::TensorList gradients, at::TensorList replicated, const std::string& group_name,
                          double norm_type, bool error_if_nonfinite) {
  check_gradients("get_total_norm", gradients);
  check_gradients("get_total_norm", replicated);
  check_norm_type(norm_type);
  const auto group = group_named("get_total_norm", group_name);
  std::vector<at::Tensor> counted = gradients.vec();
  if (group->getRank() == 0) counted.insert(counted.end(), replicated.begin(), replicated.end());
  const double norm = agreed_norm(*group, counted, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm), "trueshard::get_total_norm: the norm of order ", norm_type,
              " is ", norm, " on all ranks; look for the cause, or pass error_if_nonfinite=False to go on");
  return at::scalar_tensor(norm, at::kDouble);
}

void clip_grads_with_norm(const at::Tensor& gradient, double max_norm, const at::Tensor& total_norm) {
  check_gradients("clip_grads_with_norm_", {gradient});
  check_max_norm(max_norm);
  TORCH_CHECK(total_norm.numel() == 1, "trueshard::clip_grads_with_norm_: total_norm has size ", total_norm.sizes(),
              ", expected one number");
  const double norm = total_norm.item<double>(), factor = max_norm / (norm + 1e-6);
  if (!std::isfinite(norm) || factor >= 1.0) return;
  visit("clip_grads_with_norm_", gradient, [&](void* data, kernels::DType dtype, int64_t count) {
    const bool fp64 = dtype == kernels::DType::kFloat64;
    kernels::kernels().scale(data, dtype, count, fp64 ? factor : static_cast<double>(static_cast<float>(factor)));
  });
}

}  // namespace

bool unscale_one(const at::Tensor& gradient, double inverse_scale) {
  const at::NoGradGuard no_grad;
  std::vector<uint8_t> nonfinite(1, 0);
  visit("unscale_and_check_", gradient, [&](void* data, kernels::DType dtype, int64_t count) {
    uint8_t here = 0;
    kernels::kernels().unscale_and_check(data, dtype, count, inverse_scale, &here);
    if (here != 0)
      __atomic_store_n(nonfinite.data(), uint8_t{1}, __ATOMIC_RELAXED);  // pieces may run on several threads
  });
  return nonfinite[0] != 0;
}

double agreed_norm(c10d::ProcessGroup& group, const std::vector<at::Tensor>& gradients, double norm_type) {
  const PartialNorm mine = partial_norm(gradients, norm_type);
  const at::Tensor numbers = gather_numbers(group, at::tensor({mine.sum, mine.unit}, at::kDouble));
  std::vector<PartialNorm> partials;
  const auto* values = numbers.const_data_ptr<double>();
  for (int64_t r = 0; r < numbers.size(0); ++r) partials.push_back({values[2 * r], values[2 * r + 1]});
  return whole_norm(partials, norm_type);
}

TORCH_LIBRARY_IMPL(trueshard, CPU, library) {
  library.impl("unscale_and_check_", &unscale_and_check);
  library.impl("agree_", &agree);
  library.impl("clip_grads_with_norm_", &clip_grads_with_norm);
}

// For every device, because a call with empty lists has none; the checks refuse what is not on cpu.
TORCH_LIBRARY_IMPL(trueshard, CompositeExplicitAutograd, library) { library.impl("get_total_norm", &get_total_norm); }

}  // namespace trueshard::registration
