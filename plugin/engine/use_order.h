// SPDX-License-Identifier: BSD-3-Clause
// Role: the order in which units are used between two steps. The last round predicts the next: what to free first and
// what to make whole ahead. Where a round leaves the prediction, what was used longest ago goes first.
// Invariants: I1 no result depends on it, only when memory is held. Threads: the owner locks. Errors: none.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace trueshard::engine {

class UseOrder {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  explicit UseOrder(int64_t units) : positions_(static_cast<size_t>(units)), last_(static_cast<size_t>(units), -1) {}
  void used(int64_t unit);
  void begin_round();  // what was recorded becomes the prediction
  // False in the first round, and after a use that was not predicted.
  bool predicts() const { return predicts_; }
  // How soon the unit is expected again: larger is later, kNever is not in this round. Without a prediction: the unit
  // that was used longest ago has the largest number.
  int64_t distance(int64_t unit) const;
  // The unit expected `ahead` uses after the present one; -1: none.
  int64_t upcoming(int64_t ahead) const;

 private:
  std::vector<int64_t> recorded_, predicted_;
  std::vector<std::vector<int64_t>> positions_;  // unit -> where it stands in predicted_
  std::vector<int64_t> last_;                    // unit -> number of its last use
  int64_t uses_ = 0;
  int64_t cursor_ = -1;  // in predicted_
  bool predicts_ = false;
};

}  // namespace trueshard::engine
