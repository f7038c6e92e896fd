// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/patience.h"

#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

constexpr int kEverybody = -1;

class Patience final : public GiveUp {
 public:
  Patience(const PeerFlags& what, int peer, int64_t deadline_ns)
      : what_(what), peer_(peer), deadline_ns_(deadline_ns) {}

  bool operator()() override {
    if (what_.transport.failed()) {
      result.outcome = Outcome::kFailed;
      return true;
    }
    std::vector<int> gone, late;
    for (int r = 0; r < what_.transport.size(); ++r) {
      if (r == what_.transport.rank() || (peer_ != kEverybody && r != peer_) || reached(*what_.flags[r], what_.number))
        continue;
      late.push_back(r);
      // Look at the flag again after the process was seen gone: its last act may have been to raise it.
      if (!what_.transport.peer_alive(r) && !reached(*what_.flags[r], what_.number)) gone.push_back(r);
    }
    if (!gone.empty()) {
      result.outcome = Outcome::kGone;
      result.late = std::move(gone);
      return true;
    }
    if (!late.empty() && observe::now_ns() >= deadline_ns_) {
      result.outcome = Outcome::kTimeout;
      result.late = std::move(late);
      return true;
    }
    return false;
  }

  WaitResult result;

 private:
  const PeerFlags& what_;
  int peer_;
  int64_t deadline_ns_;
};

WaitResult wait_slowly(const PeerFlags& what, int peer) {
  const int64_t start = observe::now_ns();
  const int64_t deadline = start + what.timeout.count() * 1000000;
  Patience patience(what, peer, deadline);
  const WaitLimits limits{what.transport.size(), deadline};
  const int self = what.transport.rank();
  for (int r = 0; r < what.transport.size(); ++r) {
    if (r == self || (peer != kEverybody && r != peer)) continue;
    if (!wait(*what.flags[r], what.number, limits, patience)) break;
    patience.result = WaitResult{};  // a verdict that a late arrival overtook
  }
  patience.result.waited_ns = observe::now_ns() - start;
  return patience.result;
}

}  // namespace

bool all_reached(const PeerFlags& what) noexcept {
  for (int r = 0; r < what.transport.size(); ++r) {
    if (r != what.transport.rank() && !reached(*what.flags[r], what.number)) return false;
  }
  return true;
}

WaitResult wait_for_all(const PeerFlags& what) {
  if (all_reached(what)) return {};
  return wait_slowly(what, kEverybody);
}

WaitResult wait_for_one(const PeerFlags& what, int peer) {
  if (peer == what.transport.rank() || reached(*what.flags[peer], what.number)) return {};
  return wait_slowly(what, peer);
}

}  // namespace trueshard::comm
