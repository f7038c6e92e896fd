// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/use_order.h"

#include <algorithm>

namespace trueshard::engine {

namespace {
constexpr size_t kLongestRound = size_t{1} << 16;  // uses; between two steps, or for ever where nobody steps
}

void UseOrder::used(int64_t unit) {
  last_[static_cast<size_t>(unit)] = ++uses_;
  if (!recorded_.empty() && recorded_.back() == unit) return;
  if (recorded_.size() < kLongestRound) recorded_.push_back(unit);
  if (!predicts_) return;
  const auto& at = positions_[static_cast<size_t>(unit)];
  const auto next = std::upper_bound(at.begin(), at.end(), cursor_);
  if (next == at.end()) {
    predicts_ = false;
  } else {
    cursor_ = *next;
  }
}

void UseOrder::begin_round() {
  if (recorded_.empty()) return;
  for (auto& at : positions_) at.clear();
  predicted_.swap(recorded_);
  recorded_.clear();
  for (size_t i = 0; i < predicted_.size(); ++i)
    positions_[static_cast<size_t>(predicted_[i])].push_back(static_cast<int64_t>(i));
  cursor_ = -1;
  predicts_ = !predicted_.empty();
}

int64_t UseOrder::distance(int64_t unit) const {
  if (!predicts_) return uses_ - last_[static_cast<size_t>(unit)];
  const auto& at = positions_[static_cast<size_t>(unit)];
  const auto next = std::upper_bound(at.begin(), at.end(), cursor_);
  return next == at.end() ? kNever : *next - cursor_;
}

int64_t UseOrder::upcoming(int64_t ahead) const {
  const int64_t at = cursor_ + ahead;
  return predicts_ && at < static_cast<int64_t>(predicted_.size()) ? predicted_[static_cast<size_t>(at)] : -1;
}

}  // namespace trueshard::engine
