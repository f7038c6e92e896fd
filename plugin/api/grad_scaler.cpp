// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/grad_scaler.h>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cmath>
#include <unordered_map>

#include "plugin/optim/scale_loss.h"
#include "plugin/optim/session.h"

namespace trueshard {

namespace {
// Within these the scale and its fp32 inverse are finite, normal numbers.
const float kLargestScale = std::ldexp(1.0f, 126);
const float kSmallestScale = std::ldexp(1.0f, -126);
}  // namespace

struct ShardedGradScaler::State {
  GradScalerOptions options;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  float scale = 0;
  int64_t growth_tracker = 0, skipped = 0, bounds_hit = 0;
  struct Seen {
    bool unscaled = false, stepped = false, nonfinite = false;
  };
  std::unordered_map<const ShardedOptimizer*, Seen> seen;  // since the last update()
  bool warned = false;
  Seen seen_of(const ShardedOptimizer& optimizer) const {
    const auto found = seen.find(&optimizer);
    return found == seen.end() ? Seen{} : found->second;
  }

  std::string me() const {
    return "trueshard[rank " + std::to_string(group->getRank()) + "/" + std::to_string(group->getSize()) +
           "] ShardedGradScaler";
  }
  void set(double wanted, const char* direction) {
    const auto next = static_cast<float>(wanted);
    if (std::isfinite(next) && next <= kLargestScale && next >= kSmallestScale) {
      scale = next;
      return;
    }
    ++bounds_hit;
    if (!std::exchange(warned, true)) {
      LOG(WARNING) << me() << ": the scale " << scale << " can not " << direction
                   << " any further and stays; its inverse must remain finite. "
                   << "Gradients that stay non-finite at the lowest scale come from the model, not from scaling";
    }
  }
};

ShardedGradScaler::ShardedGradScaler(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                     const GradScalerOptions& options)
    : state_(std::make_unique<State>()) {
  TORCH_CHECK(group,
              "trueshard ShardedGradScaler: the process group is null; make it with trueshard::init_process_group()");
  state_->group = group;
  state_->options = options;
  state_->scale = static_cast<float>(options.init_scale());
  const std::string me = state_->me();
  TORCH_CHECK(state_->scale >= kSmallestScale && state_->scale <= kLargestScale, me, ": init_scale is ",
              options.init_scale(), "; expected a number from 2^-126 to 2^126");
  TORCH_CHECK(options.growth_factor() > 1.0, me, ": growth_factor is ", options.growth_factor(),
              "; expected more than 1");
  TORCH_CHECK(options.backoff_factor() > 0.0 && options.backoff_factor() < 1.0, me, ": backoff_factor is ",
              options.backoff_factor(), "; expected a number between 0 and 1");
  TORCH_CHECK(options.growth_interval() >= 1, me, ": growth_interval is ", options.growth_interval(),
              "; expected at least 1");
}
ShardedGradScaler::~ShardedGradScaler() = default;

torch::Tensor ShardedGradScaler::scale(const torch::Tensor& loss) {
  return enabled() ? optim::scale_loss(loss, static_cast<double>(state_->scale)) : loss;
}

void ShardedGradScaler::unscale_(ShardedOptimizer& optimizer) {
  if (!enabled()) return;
  const auto seen = state_->seen_of(optimizer);
  TORCH_CHECK(!seen.stepped, state_->me(),
              " unscale_: step() was already called for this optimizer; call update() first");
  TORCH_CHECK(!seen.unscaled || !optimizer.session().unscaled(), state_->me(),
              " unscale_: was already called for this optimizer since the last update(); once per step, after the last "
              "backward");
  const bool nonfinite = optimizer.session().unscale();
  state_->seen[&optimizer] = {true, false, seen.nonfinite || nonfinite};
}

bool ShardedGradScaler::step(ShardedOptimizer& optimizer) {
  if (!enabled()) {
    const auto before = optimizer.metrics().steps;
    optimizer.step();
    return optimizer.metrics().steps > before;
  }
  TORCH_CHECK(!state_->seen_of(optimizer).stepped, state_->me(),
              " step: was already called for this optimizer since the last update()");
  // Gradients may have been zeroed and made anew since unscale_.
  if (!state_->seen_of(optimizer).unscaled || !optimizer.session().unscaled()) unscale_(optimizer);
  auto& seen = state_->seen[&optimizer];
  const bool stepped = optimizer.session().step_checked();
  seen.stepped = true;
  if (!stepped) ++state_->skipped;
  return stepped;
}

void ShardedGradScaler::update() {
  if (!enabled()) return;
  auto& s = *state_;
  TORCH_CHECK(!s.seen.empty(), s.me(),
              " update: no optimizer was unscaled or stepped since the last update(); call step() first");
  bool nonfinite = false;
  for (const auto& [optimizer, seen] : s.seen) nonfinite |= seen.nonfinite;
  s.seen.clear();
  if (nonfinite) {
    s.set(static_cast<double>(s.scale) * s.options.backoff_factor(), "shrink");
    s.growth_tracker = 0;
  } else if (++s.growth_tracker == s.options.growth_interval()) {
    s.set(static_cast<double>(s.scale) * s.options.growth_factor(), "grow");
    s.growth_tracker = 0;
  }
}

double ShardedGradScaler::get_scale() const { return enabled() ? static_cast<double>(state_->scale) : 1.0; }
int64_t ShardedGradScaler::growth_tracker() const { return state_->growth_tracker; }
int64_t ShardedGradScaler::skipped_steps() const { return state_->skipped; }
int64_t ShardedGradScaler::bounds_hit() const { return state_->bounds_hit; }
bool ShardedGradScaler::enabled() const { return state_->options.enabled(); }

}  // namespace trueshard
