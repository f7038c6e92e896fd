// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/checkpoint.h>

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>

#include "plugin/checkpoint/background.h"
#include "plugin/checkpoint/load.h"
#include "plugin/checkpoint/weights.h"
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

// By name: what several of them share then has the same owner whatever the order in which they were added.
std::vector<Target> sorted_targets(const CheckpointState& state) {
  auto targets = state.targets();
  std::sort(targets.begin(), targets.end(), [](const Target& a, const Target& b) { return a.key < b.key; });
  return targets;
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

bool SaveHandle::done() const { return !save_ || save_->done(); }
void SaveHandle::wait() const {
  if (save_) save_->wait();
}

namespace {

void require_staging(const char* operation, int64_t bytes) {
  TORCH_CHECK(bytes >= 1, "trueshard ", operation, ": staging_bytes is ", bytes, "; expected at least 1");
}

void load_weights(const std::string& path, CheckpointState& state, const LoadOptions& options) {
  require_staging("load_weights", options.staging_bytes());
  const auto transport = transport_of(state);
  checkpoint::finish_background_save(transport);
  checkpoint::load_weights(
      {state.targets(), transport, path, options.allow_missing(), options.allow_unexpected(), options.staging_bytes()});
}

}  // namespace

SaveHandle save_checkpoint(const std::string& folder, const CheckpointState& state, const CheckpointOptions& options) {
  require_staging("save_checkpoint", options.staging_bytes());
  const auto transport = transport_of(state);
  checkpoint::finish_background_save(transport);
  const checkpoint::SaveRequest request{sorted_targets(state), transport, folder, options.staging_bytes()};
  if (options.asynchronous()) return SaveHandle(checkpoint::start_background_save(request));
  checkpoint::SaveJob(request).write();
  return SaveHandle();
}

void load_checkpoint(const std::string& folder, const CheckpointState& state, const LoadOptions& options) {
  require_staging("load_checkpoint", options.staging_bytes());
  const auto transport = transport_of(state);
  checkpoint::finish_background_save(transport);
  checkpoint::load({sorted_targets(state), transport, folder, options.allow_missing(), options.allow_unexpected(),
                    options.staging_bytes()});
}

void load_weights(const std::string& path, ShardedOptimizer& optimizer, const LoadOptions& options) {
  CheckpointState state;
  state.add("model", optimizer);
  load_weights(path, state, options);
}
void load_weights(const std::string& path, torch::nn::Module& module, const LoadOptions& options) {
  CheckpointState state;
  state.add("model", module);
  load_weights(path, state, options);
}

}  // namespace trueshard
