// SPDX-License-Identifier: BSD-3-Clause
// Role: whether another rank's process still runs. By pidfd where the ranks share a pid namespace, else by a lock that
// each process holds on its byte of the control page's file and that the kernel drops when the process ends.
// Invariants: I1 a process once seen dead stays dead. I2 a reused process number is not mistaken for the peer.
// Threads: alive() may be called from any thread. Errors: none; where nothing can be known the peer counts as alive.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "plugin/comm/identity.h"

namespace trueshard::comm {

class Liveness {
 public:
  Liveness(const std::vector<Identity>& ranks, int self);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;
  // This process's own byte; before the others may look. The file stays open for as long as the process is to count as
  // alive.
  void hold_lock(int file);
  // From now on peers without a common pid namespace are watched through their locks; after all of them hold theirs.
  void watch_locks();
  bool alive(int rank) noexcept;

 private:
  enum class How { kAlways, kPidfd, kProc, kLock };
  struct Peer {
    How how = How::kAlways;
    int pidfd = -1;
    int64_t pid = 0, start_time = 0;
    std::atomic<bool> dead{false};
  };
  bool look(const Peer& peer, int rank) const noexcept;
  std::unique_ptr<Peer[]> peers_;
  int size_;
  int self_;
  int lock_file_ = -1;
  std::vector<bool> lock_may_serve_;
};

}  // namespace trueshard::comm
