// SPDX-License-Identifier: BSD-3-Clause
// Role: a wait for other ranks that ends in one of four ways: they came, the group failed, one of them is gone, time is
// up. Invariants: a rank that is gone but had done its part before is not an error. Threads: any. Errors: none here;
// `late` names the ranks that did not come and the caller makes the text.
#pragma once
#include <cstdint>
#include <vector>

#include "plugin/comm/transport.h"
#include "plugin/comm/waiter.h"

namespace trueshard::comm {

enum class Outcome { kReached, kFailed, kGone, kTimeout };

struct WaitResult {
  Outcome outcome = Outcome::kReached;
  std::vector<int> late;  // kTimeout: who has not come; kGone: who is gone
  int64_t waited_ns = 0;  // 0 when the numbers were there already
};

// Waits until flags[r] >= number for every rank r but `self` (or for one rank only).
struct PeerFlags {
  Transport& transport;
  Flag* const* flags;  // one per rank
  uint64_t number;
  std::chrono::milliseconds timeout;
};
bool all_reached(const PeerFlags& what) noexcept;
WaitResult wait_for_all(const PeerFlags& what);
WaitResult wait_for_one(const PeerFlags& what, int peer);

}  // namespace trueshard::comm
