// SPDX-License-Identifier: BSD-3-Clause
// Role: the flags that ranks of this group may be asleep on, so that a failure is seen at once and not at the next
// look. Invariants: a row is removed before its memory is unmapped. Threads: any. Errors: none.
#pragma once
#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "plugin/comm/waiter.h"

namespace trueshard::comm {

class WakeList {
 public:
  void add(const void* owner, std::vector<Flag*> flags) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rows_.emplace_back(owner, std::move(flags));
  }
  void remove(const void* owner) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(rows_, [owner](const auto& row) { return row.first == owner; });
  }
  void wake_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& row : rows_) {
      for (Flag* flag : row.second) wake(*flag);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<const void*, std::vector<Flag*>>> rows_;
};

}  // namespace trueshard::comm
