// SPDX-License-Identifier: BSD-3-Clause
// Role: Adam, AdamW and SGD over shards in one pass: unscale, clip, update and the 16-bit copy, with libtorch's own
// bits. Invariants: I1 used only for an optimizer and CPU capability whose results a probe found equal to libtorch's,
// bit by bit, at first
//             use in this process; else the log says once that libtorch's own step is called. I2 state is libtorch's
//             own: the same types and tensors that the optimizer itself would have made.
// Threads: one at a time per optimizer. Errors: none of its own.
#pragma once
#include <vector>

#include <torch/optim/optimizer.h>

#include "plugin/engine/reducer.h"
#include "plugin/optim/known_optimizers.h"

namespace trueshard::optim {

struct FusedStepCall {
  torch::optim::Optimizer& optimizer;  // holds the shards in its groups, and their state
  engine::ShardedModel& model;
  engine::Reducer& reducer;
  Kind kind;
  const std::vector<std::vector<int64_t>>& members;  // per group: parameters
  const kernels::GradientFactors& factors;
};
// Steps every parameter that has a gradient and writes its compute copy. False: nothing was done, libtorch must step.
bool fused_step(const FusedStepCall& call);
// Whether fused steps of this kind have libtorch's bits here (the probe).
bool fused_step_matches(Kind kind);

}  // namespace trueshard::optim
