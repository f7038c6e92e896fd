// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/full_parameters.h>

#include "plugin/optim/session.h"

namespace trueshard {

FullParametersGuard::FullParametersGuard(ShardedOptimizer& optimizer) : optimizer_(optimizer) {
  optimizer_.session().enter_full();
}
FullParametersGuard::~FullParametersGuard() { optimizer_.session().leave_full(); }
void FullParametersGuard::broadcast(int source) { optimizer_.session().broadcast_full(source); }

StateDict full_state_dict(ShardedOptimizer& optimizer, bool rank0_only) {
  StateDict result;
  for (auto& [name, tensor] : optimizer.session().state_dict(!rank0_only || optimizer.group()->getRank() == 0))
    result.insert(name, tensor);
  return result;
}

}  // namespace trueshard
