// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/grad_scaler.h>

#include <c10/util/Exception.h>

#include <unordered_map>

#include "plugin/api/loss_scale.h"
#include "plugin/optim/scale_loss.h"
#include "plugin/optim/session.h"

namespace trueshard {

struct ShardedGradScaler::State {
  GradScalerOptions options;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::unique_ptr<LossScale> loss_scale;
  int64_t skipped = 0;
  struct Seen {
    bool unscaled = false, stepped = false, nonfinite = false;
  };
  std::unordered_map<const ShardedOptimizer*, Seen> seen;  // since the last update()
  Seen seen_of(const ShardedOptimizer& optimizer) const {
    const auto found = seen.find(&optimizer);
    return found == seen.end() ? Seen{} : found->second;
  }

  std::unique_ptr<LossScale> restored(const GradScalerState& saved) const;
  std::string me() const {
    return "trueshard[rank " + std::to_string(group->getRank()) + "/" + std::to_string(group->getSize()) +
           "] ShardedGradScaler";
  }
};

ShardedGradScaler::ShardedGradScaler(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                     const GradScalerOptions& options)
    : state_(std::make_unique<State>()) {
  TORCH_CHECK(group,
              "trueshard ShardedGradScaler: the process group is null; make it with trueshard::init_process_group()");
  state_->group = group;
  state_->options = options;
  const LossScaleRules rules{options.init_scale(), options.growth_factor(), options.backoff_factor(),
                             options.growth_interval()};
  state_->loss_scale = std::make_unique<LossScale>(rules, state_->me());
}
ShardedGradScaler::~ShardedGradScaler() = default;

torch::Tensor ShardedGradScaler::scale(const torch::Tensor& loss) {
  return enabled() ? optim::scale_loss(loss, state_->loss_scale->value()) : loss;
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
  s.loss_scale->update(nonfinite);
}

GradScalerState ShardedGradScaler::state_dict() const {
  const auto& s = *state_;
  TORCH_CHECK(s.seen.empty(), s.me(), " state_dict: a step is under way; call update() first");
  const auto& rules = s.loss_scale->rules();
  return {enabled(),
          s.loss_scale->value(),
          rules.growth_factor,
          rules.backoff_factor,
          rules.growth_interval,
          s.loss_scale->growth_tracker(),
          s.skipped,
          s.loss_scale->bounds_hit()};
}

std::unique_ptr<LossScale> ShardedGradScaler::State::restored(const GradScalerState& saved) const {
  TORCH_CHECK(saved.enabled == options.enabled(), me(), " load_state_dict: the saved scaler was ",
              saved.enabled ? "enabled" : "disabled", ", this one is ", options.enabled() ? "enabled" : "disabled",
              "; make it with the same GradScalerOptions.enabled");
  const LossScaleRules rules{options.init_scale(), saved.growth_factor, saved.backoff_factor, saved.growth_interval};
  auto restored = std::make_unique<LossScale>(rules, me());
  restored->restore(saved.scale, saved.growth_tracker);
  restored->restore_bounds_hit(saved.bounds_hit);
  return restored;
}

void ShardedGradScaler::check_state_dict(const GradScalerState& state) const { state_->restored(state); }

void ShardedGradScaler::load_state_dict(const GradScalerState& state) {
  state_->loss_scale = state_->restored(state);
  state_->skipped = state.skipped_steps;
  state_->seen.clear();
}

double ShardedGradScaler::get_scale() const { return enabled() ? state_->loss_scale->value() : 1.0; }
int64_t ShardedGradScaler::growth_tracker() const { return state_->loss_scale->growth_tracker(); }
int64_t ShardedGradScaler::skipped_steps() const { return state_->skipped; }
int64_t ShardedGradScaler::bounds_hit() const { return state_->loss_scale->bounds_hit(); }
bool ShardedGradScaler::enabled() const { return state_->options.enabled(); }

}  // namespace trueshard
