// SPDX-License-Identifier: BSD-3-Clause
// Role: whole fp32 parameters, for reading and writing, on every rank.
// Invariants: see FullParametersGuard. Threads: as the optimizer. Errors: c10::Error on all ranks.
#pragma once
#include <string>

#include <c10/util/Exception.h>  // torch/ordered_dict.h uses its macros and does not include it
#include <torch/ordered_dict.h>

#include <trueshard/sharded_optimizer.h>

namespace trueshard {

// While it lives every managed parameter is whole and shows its fp32 master (as FSDP's summon_full_params). Entering is
// collective. Leaving sends nothing: each rank keeps its own slice of what was written and rounds its compute copy from
// what it sees, so all ranks must write the same values; a digest rides on the next collective, and a difference is an
// error on all ranks. broadcast(source) before leaving gives every rank what `source` wrote; after such an error (and
// zero_grad()) a new guard with the same writes on all ranks, or with broadcast(), puts things right.
// Views of parameters do not survive entering or leaving under a 16-bit policy: the parameter's dtype changes.
// Entering while a backward pass runs is an error. Do not enter between a forward and its backward: libtorch gives the
// library no way to notice.
class TRUESHARD_API FullParametersGuard {
 public:
  explicit FullParametersGuard(ShardedOptimizer& optimizer);
  ~FullParametersGuard();
  FullParametersGuard(const FullParametersGuard&) = delete;
  FullParametersGuard& operator=(const FullParametersGuard&) = delete;
  void broadcast(int source);  // collective

 private:
  ShardedOptimizer& optimizer_;
};

using StateDict = torch::OrderedDict<std::string, torch::Tensor>;

// Copies of everything the untouched module would save, under its names: parameters as whole fp32 masters (fp64 for
// fp64 parameters), buffers in their own dtype. Tied parameters appear under each of their names with one tensor.
// Collective; with rank0_only the other ranks get an empty dictionary. Reduced gradients and optimizer state are
// untouched.
TRUESHARD_API StateDict full_state_dict(ShardedOptimizer& optimizer, bool rank0_only = false);

}  // namespace trueshard
