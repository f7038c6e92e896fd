// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/api/loss_scale.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cmath>
#include <utility>

namespace trueshard {

namespace {
// Within these the scale and its fp32 inverse are finite, normal numbers.
const float kLargestScale = std::ldexp(1.0f, 126);
const float kSmallestScale = std::ldexp(1.0f, -126);
}  // namespace

LossScale::LossScale(const LossScaleRules& rules, std::string who)
    : rules_(rules), who_(std::move(who)), scale_(static_cast<float>(rules.init_scale)) {
  TORCH_CHECK(scale_ >= kSmallestScale && scale_ <= kLargestScale, who_, ": init_scale is ", rules.init_scale,
              "; expected a number from 2^-126 to 2^126");
  TORCH_CHECK(rules.growth_factor > 1.0, who_, ": growth_factor is ", rules.growth_factor, "; expected more than 1");
  TORCH_CHECK(rules.backoff_factor > 0.0 && rules.backoff_factor < 1.0, who_, ": backoff_factor is ",
              rules.backoff_factor, "; expected a number between 0 and 1");
  TORCH_CHECK(rules.growth_interval >= 1, who_, ": growth_interval is ", rules.growth_interval,
              "; expected at least 1");
}

void LossScale::set(double wanted, const char* direction) {
  const auto next = static_cast<float>(wanted);
  if (std::isfinite(next) && next <= kLargestScale && next >= kSmallestScale) {
    scale_ = next;
    return;
  }
  ++bounds_hit_;
  if (!std::exchange(warned_, true)) {
    LOG(WARNING) << who_ << ": the scale " << scale_ << " can not " << direction
                 << " any further and stays; its inverse must remain finite. "
                 << "Gradients that stay non-finite at the lowest scale come from the model, not from scaling";
  }
}

void LossScale::update(bool nonfinite) {
  if (nonfinite) {
    set(value() * rules_.backoff_factor, "shrink");
    growth_tracker_ = 0;
  } else if (++growth_tracker_ >= rules_.growth_interval) {
    set(value() * rules_.growth_factor, "grow");
    growth_tracker_ = 0;
  }
}

void LossScale::restore(double scale, int64_t growth_tracker) {
  const auto wanted = static_cast<float>(scale);
  TORCH_CHECK(wanted >= kSmallestScale && wanted <= kLargestScale && growth_tracker >= 0, who_,
              " load_state_dict: the state has scale ", scale, " and growth tracker ", growth_tracker,
              "; expected a scale from 2^-126 to 2^126 and a count");
  scale_ = wanted;
  growth_tracker_ = growth_tracker;
}

}  // namespace trueshard
