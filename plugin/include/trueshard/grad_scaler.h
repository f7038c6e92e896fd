// SPDX-License-Identifier: BSD-3-Clause
// Role: loss scaling with one decision for all ranks; semantics and defaults of torch.amp.GradScaler (docs/numerics.md
// section 4). Invariants: I1 scale, growth count and skip decisions are equal on all ranks. I2 each gradient is divided
// exactly once, by the
//             scale its backward used. I3 scale and 1/scale stay finite and positive.
// Threads: one thread at a time. Errors: c10::Error on all ranks; a failed call alters nothing.
#pragma once
#include <memory>

#include <trueshard/sharded_optimizer.h>

namespace trueshard {

struct TRUESHARD_API GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536.0;
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  // false: scale() returns the loss, nothing is checked, step() is the optimizer's own.
  TORCH_ARG(bool, enabled) = true;
};

// What torch.amp.GradScaler's state_dict() holds, and the counts.
struct TRUESHARD_API GradScalerState {
  bool enabled = true;
  double scale = 1.0, growth_factor = 2.0, backoff_factor = 0.5;
  int64_t growth_interval = 2000, growth_tracker = 0, skipped_steps = 0, bounds_hit = 0;
};

class TRUESHARD_API ShardedGradScaler {
 public:
  explicit ShardedGradScaler(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                             const GradScalerOptions& options = {});
  ~ShardedGradScaler();
  ShardedGradScaler(const ShardedGradScaler&) = delete;
  ShardedGradScaler& operator=(const ShardedGradScaler&) = delete;

  // loss * scale; fp32 for 16-bit losses. Leaves a mark in the graph, by which the optimizer's gradients know their
  // scale.
  torch::Tensor scale(const torch::Tensor& loss);
  // Divides the reduced gradients by the scale their passes used and checks them for inf and NaN. Once per step and
  // optimizer. Gradients whose loss was not scaled are checked only. Collective.
  void unscale_(ShardedOptimizer& optimizer);
  // Unscales if unscale_ was not called, then steps unless any rank found a non-finite gradient. True when the step was
  // taken.
  bool step(ShardedOptimizer& optimizer);
  // Once per iteration, after all optimizers: grows or backs off the scale. Not collective.
  void update();

  double get_scale() const;
  int64_t growth_tracker() const;
  int64_t skipped_steps() const;
  int64_t bounds_hit() const;  // how often the scale could not grow or shrink any further
  bool enabled() const;

  // Between update() and the next step. Loading refuses, before anything is set, numbers that no scaler can have, and
  // the state of an enabled scaler in a disabled one or the other way round. Not collective.
  GradScalerState state_dict() const;
  void load_state_dict(const GradScalerState& state);
  void check_state_dict(const GradScalerState& state) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace trueshard
