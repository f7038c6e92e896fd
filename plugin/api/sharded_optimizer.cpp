// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/sharded_optimizer.h>

#include <c10/util/Exception.h>

#include "plugin/optim/session.h"

namespace trueshard {

ShardedOptimizer::ShardedOptimizer(std::unique_ptr<optim::Session> session)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, session->inner().defaults().clone()),
      session_(std::move(session)) {
  session_->adopt_into(*this);
}
ShardedOptimizer::~ShardedOptimizer() = default;

at::Tensor ShardedOptimizer::step(LossClosure closure) { return session_->step(closure); }
void ShardedOptimizer::zero_grad(bool set_to_none) { session_->zero_grad(set_to_none); }
void ShardedOptimizer::finish_reduction() {
  session_->finish_reduction();
  session_->materialize();
}
void ShardedOptimizer::empty_pass() { session_->empty_pass(); }
Metrics ShardedOptimizer::metrics() const { return session_->metrics(); }
const ShardOptions& ShardedOptimizer::options() const { return session_->options(); }
const c10::intrusive_ptr<c10d::ProcessGroup>& ShardedOptimizer::group() const { return session_->group(); }

std::vector<torch::optim::OptimizerParamGroup>& ShardedOptimizer::param_groups() {
  session_->materialize();
  return torch::optim::Optimizer::param_groups();
}
std::vector<at::Tensor>& ShardedOptimizer::parameters() {
  session_->materialize();
  return torch::optim::Optimizer::parameters();
}

void ShardedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup&) {
  TORCH_CHECK(false, session_->me(),
              " add_param_group: groups can not be added to a sharded optimizer; build the optimizer with all its "
              "groups before shard()");
}
void ShardedOptimizer::save(torch::serialize::OutputArchive&) const {
  TORCH_CHECK(false, session_->me(),
              " save: torch::save of a sharded optimizer would hold one rank's shard only; use "
              "trueshard::full_state_dict() for whole weights by name");
}
void ShardedOptimizer::load(torch::serialize::InputArchive&) {
  TORCH_CHECK(false, session_->me(),
              " load: torch::load can not restore a sharded optimizer; load into the plain optimizer before shard(), "
              "which carries its state over");
}

NoSyncGuard::NoSyncGuard(ShardedOptimizer& optimizer) : optimizer_(optimizer) {
  optimizer_.session().change_no_sync(1);
}
NoSyncGuard::~NoSyncGuard() { optimizer_.session().change_no_sync(-1); }

}  // namespace trueshard
