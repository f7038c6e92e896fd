// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/checkpoint.h>

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>

#include "plugin/checkpoint/load.h"
#include "plugin/checkpoint/save.h"
#include "plugin/comm/backend.h"

namespace trueshard {

using checkpoint::EntryKind;
using checkpoint::StoredEntry;
using checkpoint::Target;

namespace {

// Keys are parts of file names.
void require_key(const std::string& name, const std::vector<Target>& targets) {
  const bool plain =
      !name.empty() && name.size() <= 100 && name[0] != '.' &&
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") == std::string::npos;
  TORCH_CHECK(plain, "trueshard CheckpointState::add: the name is '", name,
              "'; expected letters, digits, '_', '-' and '.', not '.' first, at most 100 of them");
  for (const auto& target : targets)
    TORCH_CHECK(target.key != name, "trueshard CheckpointState::add: '", name, "' was added already");
}

// LRScheduler keeps its count to itself and its subclasses.
struct StepCount : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&StepCount::step_count_); }
};

checkpoint::StoredScaler stored(const GradScalerState& state) {
  return {state.enabled,         state.scale,          state.growth_factor, state.backoff_factor,
          state.growth_interval, state.growth_tracker, state.skipped_steps, state.bounds_hit};
}
GradScalerState live(const checkpoint::StoredScaler& state) {
  return {state.enabled,         state.scale,          state.growth_factor, state.backoff_factor,
          state.growth_interval, state.growth_tracker, state.skipped_steps, state.bounds_hit};
}

template <typename Value>
void add_value(Target& target, EntryKind kind, Value& value, Value StoredEntry::*member) {
  target.kind = kind;
  target.describe = [&value, member](StoredEntry& entry) { entry.*member = value; };
  target.check = [](const StoredEntry&) {};
  target.apply = [&value, member](const StoredEntry& entry) { value = entry.*member; };
}

std::shared_ptr<comm::Transport> transport_of(const CheckpointState& state) {
  auto transport = checkpoint::transport_of(state.targets());
  if (!state.group()) return transport;
  auto given = comm::transport_of(*state.group());
  TORCH_CHECK(!transport || transport == given,
              "trueshard CheckpointState: the given process group is not that of the sharded optimizers");
  return given;
}

}  // namespace

CheckpointState::CheckpointState(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), targets_(std::make_unique<std::vector<Target>>()) {}
CheckpointState::~CheckpointState() = default;

Target& CheckpointState::add_target(const std::string& name) {
  require_key(name, *targets_);
  targets_->emplace_back();
  targets_->back().key = name;
  return targets_->back();
}

void CheckpointState::add(const std::string& name, ShardedOptimizer& optimizer) {
  auto& target = add_target(name);
  target.kind = EntryKind::kOptimizer;
  target.session = &optimizer.session();
}
void CheckpointState::add(const std::string& name, ShardedGradScaler& scaler) {
  auto& target = add_target(name);
  target.kind = EntryKind::kScaler;
  target.describe = [&scaler](StoredEntry& entry) { entry.scaler = stored(scaler.state_dict()); };
  target.check = [&scaler](const StoredEntry& entry) { scaler.check_state_dict(live(*entry.scaler)); };
  target.apply = [&scaler](const StoredEntry& entry) { scaler.load_state_dict(live(*entry.scaler)); };
}
void CheckpointState::add(const std::string& name, torch::nn::Module& module) {
  auto& target = add_target(name);
  target.kind = EntryKind::kModule;
  target.module = [&module] { return engine::view_module(module, {}); };
}
void CheckpointState::add(const std::string& name, torch::jit::Module& module) {
  auto& target = add_target(name);
  target.kind = EntryKind::kModule;
  target.module = [&module] { return engine::view_module(module, {}); };
}
void CheckpointState::add(const std::string& name, torch::optim::LRScheduler& scheduler) {
  auto& target = add_target(name);
  target.kind = EntryKind::kScheduler;
  target.describe = [&scheduler](StoredEntry& entry) { entry.integer = StepCount::of(scheduler); };
  target.check = [](const StoredEntry& entry) {
    TORCH_CHECK(entry.integer >= 0 && entry.integer <= UINT32_MAX, "the schedule's step count is ", entry.integer);
  };
  target.apply = [&scheduler](const StoredEntry& entry) {
    StepCount::of(scheduler) = static_cast<unsigned>(entry.integer);
  };
}
void CheckpointState::add(const std::string& name, int64_t& value) {
  add_value(add_target(name), EntryKind::kInteger, value, &StoredEntry::integer);
}
void CheckpointState::add(const std::string& name, double& value) {
  add_value(add_target(name), EntryKind::kNumber, value, &StoredEntry::number);
}
void CheckpointState::add(const std::string& name, bool& value) {
  add_value(add_target(name), EntryKind::kFlag, value, &StoredEntry::flag);
}
void CheckpointState::add(const std::string& name, std::string& value) {
  add_value(add_target(name), EntryKind::kText, value, &StoredEntry::text);
}
void CheckpointState::add(const std::string& name, torch::Tensor& value) {
  auto& target = add_target(name);
  target.kind = EntryKind::kTensor;
  target.tensor = &value;
}

void save_checkpoint(const std::string& folder, const CheckpointState& state, const CheckpointOptions& options) {
  TORCH_CHECK(options.staging_bytes() >= 1, "trueshard save_checkpoint: staging_bytes is ", options.staging_bytes(),
              "; expected at least 1");
  checkpoint::SaveJob job({state.targets(), transport_of(state), folder, options.staging_bytes()});
  job.write();
}

void load_checkpoint(const std::string& folder, const CheckpointState& state, const LoadOptions& options) {
  TORCH_CHECK(options.staging_bytes() >= 1, "trueshard load_checkpoint: staging_bytes is ", options.staging_bytes(),
              "; expected at least 1");
  checkpoint::load({state.targets(), transport_of(state), folder, options.allow_missing(), options.allow_unexpected(),
                    options.staging_bytes()});
}

}  // namespace trueshard
