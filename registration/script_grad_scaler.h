// SPDX-License-Identifier: BSD-3-Clause
// Role: torch.classes.trueshard.ShardedGradScaler: loss scaling with one decision for all ranks, for loops written in
// TorchScript, where a step is a list of gradients and not an optimizer object. Rules and defaults of
// torch.amp.GradScaler. Invariants: I1 scale, growth count and decisions are equal on all ranks of the group. I2
// gradients are divided exactly once per step: a second unscale_ throws and alters nothing. I3 scale and 1/scale stay
// finite and positive. I4 an instance may be an attribute of a module that is saved; the loaded one finds the group by
// its name at first use. Threads: one at a time. Errors: c10::Error; communication errors of the group.
#pragma once
#include <string>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include "plugin/api/loss_scale.h"

namespace trueshard::registration {

class ScriptGradScaler final : public torch::CustomClassHolder {
 public:
  using StateDict = c10::Dict<std::string, double>;
  ScriptGradScaler(std::string group_name, const LossScaleRules& rules, bool enabled);

  at::Tensor scale(const at::Tensor& loss) const;
  // Collective: divides the gradients by the scale; true when all of them, on all ranks, were finite.
  bool unscale_(const std::vector<at::Tensor>& gradients);
  // Collective: looks without dividing, for a step that takes grad_scale() and found_inf() itself.
  bool check(const std::vector<at::Tensor>& gradients);
  // After unscale_ or check: whether to step. Counts what is skipped.
  bool should_step();
  void update();  // once per iteration

  at::Tensor grad_scale() const;
  at::Tensor found_inf() const;
  double get_scale() const { return enabled_ ? loss_scale_.value() : 1.0; }
  int64_t growth_tracker() const { return loss_scale_.growth_tracker(); }
  int64_t skipped_steps() const { return skipped_; }
  int64_t bounds_hit() const { return loss_scale_.bounds_hit(); }
  bool is_enabled() const { return enabled_; }
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);
  std::string describe() const;  // everything a saved module needs, as text
  static c10::intrusive_ptr<ScriptGradScaler> from_description(const std::string& text);

 private:
  enum class Stage { kFresh, kChecked, kUnscaled, kDecided };
  bool agree(bool found) const;
  std::string group_name_;  // empty: this rank alone
  LossScale loss_scale_;
  bool enabled_;
  Stage stage_ = Stage::kFresh;
  bool found_inf_ = false;
  int64_t skipped_ = 0;
};

}  // namespace trueshard::registration
