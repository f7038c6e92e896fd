// SPDX-License-Identifier: BSD-3-Clause
// Formula: docs/numerics.md section 3; coef = max_norm / (norm + 1e-6) as in torch.nn.utils.clip_grad_norm_.
#include <trueshard/clip_grad_norm.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "plugin/optim/session.h"

namespace trueshard {

namespace {

struct Arguments {
  double max_norm;
  double norm_type;
};

void validate(const std::vector<ShardedOptimizer*>& optimizers, const Arguments& arguments) {
  TORCH_CHECK(!optimizers.empty(), "trueshard clip_grad_norm_: no optimizer was given");
  for (const auto* optimizer : optimizers)
    TORCH_CHECK(optimizer != nullptr, "trueshard clip_grad_norm_: one of the optimizers is null");
  const auto me = optimizers[0]->session().me();
  TORCH_CHECK(arguments.norm_type > 0, me, " clip_grad_norm_: norm_type is ", arguments.norm_type,
              "; expected a number above 0, or infinity");
  TORCH_CHECK(arguments.max_norm >= 0, me, " clip_grad_norm_: max_norm is ", arguments.max_norm,
              "; expected 0 or more");
}

using engine::NormQuery;
using kernels::NormKind;

// One value over the gradients of all optimizers: canonical tree over parameters as named, optimizers as given.
double total(const std::vector<ShardedOptimizer*>& optimizers, const NormQuery& query, double* factor) {
  std::vector<double> values;
  std::vector<bool> present;
  std::unordered_set<c10::TensorImpl*> seen;
  double common = 0;
  std::vector<optim::Session::NormResult> results;
  for (auto* optimizer : optimizers) results.push_back(optimizer->session().norm_values(query));
  for (const auto& result : results) common = std::max(common, result.factor);
  for (size_t i = 0; i < optimizers.size(); ++i) {
    const auto& parameters = optimizers[i]->session().model().parameters();
    // Optimizers whose records stand for differently scaled gradients: each its own factor, squared, on the sums.
    const double adjust = results[i].factor == common ? 1.0 : results[i].factor / common;
    for (size_t p = 0; p < parameters.size(); ++p) {
      values.push_back(adjust == 1.0 ? results[i].values[p] : results[i].values[p] * adjust * adjust);
      present.push_back(results[i].present[p] && seen.insert(parameters[p].tensor.unsafeGetTensorImpl()).second);
    }
  }
  *factor = common;
  return plan::combine_values(values, present, engine::NormExchange::combine_of(query.kind));
}

bool any_fp64(const std::vector<ShardedOptimizer*>& optimizers) {
  for (auto* optimizer : optimizers) {
    auto& session = optimizer->session();
    for (int64_t p = 0; p < session.model().size(); ++p) {
      if (session.reducer().has_gradient(p) && session.model().parameters()[p].master_dtype == c10::kDouble)
        return true;
    }
  }
  return false;
}

// A power of two near 1 / largest, so that squares and powers of fp64 values neither overflow nor vanish.
double scale_for(double largest) {
  int exponent = 0;
  std::frexp(largest, &exponent);
  return std::ldexp(1.0, std::clamp(-exponent, -1000, 1000));
}

double norm_of(const std::vector<ShardedOptimizer*>& optimizers, double norm_type) {
  double factor = 1.0;
  NormQuery query;
  if (norm_type == 2.0) {
    query.allow_record = true;
    if (any_fp64(optimizers)) {
      const double largest = total(optimizers, {NormKind::kMaximum, 0, 1.0, false}, &factor);
      if (!std::isfinite(largest) || largest == 0) return largest;
      query.scale = scale_for(largest);
    }
    const double sum = total(optimizers, query, &factor);
    return std::sqrt(sum) * factor / query.scale;
  }
  if (norm_type == 1.0) return total(optimizers, {NormKind::kAbsolute, 0, 1.0, false}, &factor);
  const double largest = total(optimizers, {NormKind::kMaximum, 0, 1.0, false}, &factor);
  if (std::isinf(norm_type) || !std::isfinite(largest) || largest == 0) return largest;
  query = {NormKind::kPower, norm_type, scale_for(largest), false};
  return std::pow(total(optimizers, query, &factor), 1.0 / norm_type) / query.scale;
}

}  // namespace

double clip_grad_norm_(const std::vector<ShardedOptimizer*>& optimizers, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  validate(optimizers, {max_norm, norm_type});
  for (auto* optimizer : optimizers) optimizer->session().check_clippable();
  const double norm = norm_of(optimizers, norm_type);
  for (auto* optimizer : optimizers) optimizer->session().note_norm(norm);
  if (!std::isfinite(norm)) {
    TORCH_CHECK(!error_if_nonfinite, optimizers[0]->session().me(), " clip_grad_norm_: the gradient norm is ", norm,
                "; no gradient was altered. Pass error_if_nonfinite = false to have it returned instead");
    return norm;
  }
  const auto coefficient = static_cast<float>(max_norm / (norm + 1e-6));
  if (coefficient < 1.0f) {
    for (auto* optimizer : optimizers) optimizer->session().clip(static_cast<double>(coefficient));
  }
  return norm;
}

double clip_grad_norm_(ShardedOptimizer& optimizer, double max_norm, double norm_type, bool error_if_nonfinite) {
  return clip_grad_norm_(std::vector<ShardedOptimizer*>{&optimizer}, max_norm, norm_type, error_if_nonfinite);
}

double clip_grad_norm_(ShardedOptimizer& optimizer, double max_norm, const std::string& norm_type,
                       bool error_if_nonfinite) {
  double number = std::numeric_limits<double>::infinity();
  if (norm_type != "inf") {
    size_t used = 0;
    try {
      number = std::stod(norm_type, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    TORCH_CHECK(used == norm_type.size() && used > 0, optimizer.session().me(), " clip_grad_norm_: norm_type is '",
                norm_type, "'; expected a number above 0, or \"inf\"");
  }
  return clip_grad_norm_(optimizer, max_norm, number, error_if_nonfinite);
}

}  // namespace trueshard
