// SPDX-License-Identifier: BSD-3-Clause
// Role: tells every rank when all ranks have finished writing to their masters, so that they may be read. A rank raises
// its number at the end of each writing; a reader waits, when it reads and not before, until everybody's is as high as
// its own. Invariants: I1 all ranks write the same number of times. I2 advance() never waits. Threads: any. Errors:
// c10::DistBackendError from wait(), within the group's timeout; a dead peer within a second.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "plugin/comm/transport.h"

namespace trueshard::engine {

class MasterEpoch {
 public:
  MasterEpoch(const std::shared_ptr<comm::Transport>& transport, const std::string& name);  // collective
  ~MasterEpoch();
  MasterEpoch(const MasterEpoch&) = delete;
  MasterEpoch& operator=(const MasterEpoch&) = delete;
  void advance();
  void wait();

 private:
  std::weak_ptr<comm::Transport> transport_;  // modules may outlive the group
  std::shared_ptr<comm::Region> region_;
  std::vector<comm::Flag*> flags_;
  int rank_;
  std::string where_;
  std::atomic<uint64_t> number_{0};
  std::atomic<uint64_t> seen_{0};  // everybody has reached it
};

}  // namespace trueshard::engine
