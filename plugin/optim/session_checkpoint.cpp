// SPDX-License-Identifier: BSD-3-Clause
// What checkpoints read and write of a sharded module and its optimizer.
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include "plugin/optim/session.h"

namespace trueshard::optim {

namespace {

// Not through ShardedOptimizer, whose own accessors apply waiting factors first.
torch::optim::Optimizer& plain(ShardedOptimizer& outer) { return outer; }

}  // namespace

void Session::prepare_checkpoint(const char* operation) {
  TORCH_CHECK(full_depth_ == 0, me(), " ", operation, ": a FullParametersGuard is alive; leave it first");
  agree_on_changes(operation);
  require_groups();
}

std::string Session::optimizer_type() const {
  const std::string name = type_name(*inner_);
  const auto colon = name.rfind(':');
  return kind_ == Kind::kUnknown || colon == std::string::npos ? name : name.substr(colon + 1);
}

torch::optim::OptimizerOptions& Session::group_options(int64_t group) {
  return plain(*outer_).param_groups()[static_cast<size_t>(group)].options();
}

const torch::optim::OptimizerParamState* Session::state(int64_t parameter) const {
  const auto& shard = shards_[parameter];
  if (!shard.defined()) return nullptr;
  const auto& all = plain(*outer_).state();
  const auto found = all.find(shard.unsafeGetTensorImpl());
  return found == all.end() ? nullptr : found->second.get();
}

void Session::set_state(int64_t parameter, std::unique_ptr<torch::optim::OptimizerParamState> state) {
  const auto& shard = shards_[parameter];
  TORCH_CHECK(shard.defined() || !state, me(), ": parameter '", model_->parameters()[parameter].name,
              "' is not in the optimizer and can have no state");
  if (!shard.defined()) return;
  auto& all = plain(*outer_).state();
  if (state) {
    all[shard.unsafeGetTensorImpl()] = std::move(state);
  } else {
    all.erase(shard.unsafeGetTensorImpl());
  }
}

void Session::set_step_counts(const StepCounts& counts) {
  metrics_.steps = counts.steps;
  metrics_.skipped_steps = counts.skipped_steps;
}

void Session::publish_masters() {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (model_->manages(p)) model_->round_to_compute(p);
  }
  publisher_->publish(engine::Publisher::Which::kAll);
}

}  // namespace trueshard::optim
