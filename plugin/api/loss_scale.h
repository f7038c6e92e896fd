// SPDX-License-Identifier: BSD-3-Clause
// Role: the number that a scaler multiplies losses by, and when it grows and shrinks (torch.amp.GradScaler's rules).
// Invariants: scale and 1/scale are finite, positive and normal fp32 numbers; a change that would break this is not
// made, is counted, and is logged once. Threads: one at a time. Errors: c10::Error for impossible options.
#pragma once
#include <cstdint>
#include <string>

namespace trueshard {

struct LossScaleRules {
  double init_scale = 65536.0, growth_factor = 2.0, backoff_factor = 0.5;
  int64_t growth_interval = 2000;
};

class LossScale {
 public:
  // `who` starts errors and log lines: "trueshard[rank 1/4] ShardedGradScaler".
  LossScale(const LossScaleRules& rules, std::string who);
  void update(bool nonfinite);  // once per step
  double value() const { return static_cast<double>(scale_); }
  int64_t growth_tracker() const { return growth_tracker_; }
  int64_t bounds_hit() const { return bounds_hit_; }
  const LossScaleRules& rules() const { return rules_; }
  void restore(double scale, int64_t growth_tracker);
  void restore_bounds_hit(int64_t count) { bounds_hit_ = count; }

 private:
  void set(double wanted, const char* direction);
  LossScaleRules rules_;
  std::string who_;
  float scale_ = 0;
  int64_t growth_tracker_ = 0, bounds_hit_ = 0;
  bool warned_ = false;
};

}  // namespace trueshard
