// SPDX-License-Identifier: BSD-3-Clause
// Role: from a launch to a store, and from a store to a c10d process group with our backend.
// Invariants: I1 a store made from the environment is made once per process, and serves all groups. I2 a group's name
// is free in c10d's registry of this process (ranks that are threads share it) and the group name is the same on all
// ranks in the store. Threads: any. Errors: as trueshard/process_group.h.
#pragma once
#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "plugin/comm/launch_environment.h"

namespace trueshard::comm {

c10::intrusive_ptr<c10d::Store> store_for(const Launch& launch, std::chrono::milliseconds timeout);

struct GroupRequest {
  c10::intrusive_ptr<c10d::Store> store;  // may be null for one rank
  int rank = 0;
  int size = 1;
  std::string name;  // empty: made from the number of this rank's calls on this store
  std::chrono::milliseconds timeout{0};
};
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupRequest& request);

}  // namespace trueshard::comm
