// SPDX-License-Identifier: BSD-3-Clause
// Role: makes a c10d process group whose backend is trueshard's, from the launch environment or from a store.
// Invariants: the group is an ordinary c10d::ProcessGroup; keep it alive for as long as anything sharded over it.
// Threads: collective: every rank calls it once. Ranks may be threads of one process (each with its own call).
// Errors: c10::Error for an incomplete environment (names what is missing); c10::DistBackendError when ranks do not
// arrive within the timeout or do not run on one host.
#pragma once
#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <trueshard/export.h>

namespace trueshard {

struct TRUESHARD_API ProcessGroupOptions {
  // Longest time any call on the group waits for another rank. torch.distributed's default is the same 30 minutes.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
  // Must be the same on all ranks; empty: a name that is unique per call, in the order of the calls.
  TORCH_ARG(std::string, group_name);
};

// From the environment: torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; a store hosted by the agent is used),
// then Open MPI, then Slurm (inside a step only). World size 1 when none is set.
TRUESHARD_API c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(ProcessGroupOptions options = {});

// From a store that all ranks share. 0 <= rank < world_size.
TRUESHARD_API c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                                        int rank, int world_size,
                                                                        ProcessGroupOptions options = {});

}  // namespace trueshard
