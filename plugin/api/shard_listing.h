// SPDX-License-Identifier: BSD-3-Clause
// Role: shard() for modules that are neither torch::nn nor torch::jit objects on this side (Python's): the caller lists
// what the module registers. The same engine, the same rules. Threads, errors: as shard() (sharded_optimizer.h).
#pragma once
#include <trueshard/sharded_optimizer.h>

#include "plugin/engine/module_view.h"

namespace trueshard {

TRUESHARD_API std::unique_ptr<ShardedOptimizer> shard_listing(const engine::ModuleListing& listing,
                                                              std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                              const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                              const ShardOptions& options);

}  // namespace trueshard
