// SPDX-License-Identifier: BSD-3-Clause
// Role: the way back: after a step every rank fetches the pieces the others stepped, straight from their compute
// copies; and whole fp32 masters, for FullParametersGuard and full_state_dict. Invariants: I1 when a call returns,
// every rank has fetched what it needs: the caller may write to parameters at once. I2 nothing
//             to send when replicated.
// Threads: one at a time; collective. Errors: communication only.
#pragma once
#include "plugin/engine/reducer.h"

namespace trueshard::engine {

class Publisher {
 public:
  Publisher(std::shared_ptr<ShardedModel> model, Reducer& reducer) : model_(std::move(model)), reducer_(reducer) {}
  enum class Which { kStepped, kAll };
  // Collective: compute copies are whole and equal on all ranks afterwards; ZeRO-3: will be when they are used next.
  void publish(Which which = Which::kStepped);
  // Whole masters of all parameters, in master dtype (the dtype itself for low-precision masters), one tensor each in
  // the parameter's own memory order. Collective; `wanted` false: takes part and returns nothing.
  std::vector<at::Tensor> gather_masters(bool wanted);
  int64_t bytes_gathered() const { return bytes_gathered_; }
  double seconds() const { return seconds_; }

 private:
  void bump_versions(Which which);

  std::shared_ptr<ShardedModel> model_;
  Reducer& reducer_;
  int64_t bytes_gathered_ = 0;
  double seconds_ = 0;
};

}  // namespace trueshard::engine
