// SPDX-License-Identifier: BSD-3-Clause
// A sharded optimizer's part: masters, state, options, buffers.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <cstring>
#include <unordered_map>

#include "plugin/checkpoint/matching.h"

namespace trueshard::checkpoint {

namespace {

struct StoredState {  // of one parameter
  std::map<std::string, const StoredTensor*> fields;
};

// "state.<parameter>.<field>" -> parameter -> fields; names of another form are left out.
std::map<std::string, StoredState> states_in(const StoredFile& file) {
  const std::string prefix = "state.";
  std::map<std::string, StoredState> states;
  for (const auto& tensor : file.tensors) {
    const auto dot = tensor.name.rfind('.');
    if (tensor.name.compare(0, prefix.size(), prefix) != 0 || dot <= prefix.size()) continue;
    states[tensor.name.substr(prefix.size(), dot - prefix.size())].fields[tensor.name.substr(dot + 1)] = &tensor;
  }
  return states;
}

std::vector<std::string> all_names(const engine::Parameter& parameter) {
  std::vector<std::string> names{parameter.name};
  names.insert(names.end(), parameter.other_names.begin(), parameter.other_names.end());
  return names;
}

}  // namespace

void Matching::match_optimizer(const Target& target, const StoredEntry& entry) {
  auto& session = *target.session;
  auto& model = session.model();
  const auto& file = *manifest_.file(entry.file);
  auto names = names_in(file);
  if (entry.optimizer->type != session.optimizer_type()) {
    others_.push_back("'" + target.key + "' (optimizer " + entry.optimizer->type + " in the checkpoint, " +
                      session.optimizer_type() + " in the program)");
  }
  for (int64_t p = 0; p < model.size(); ++p) {
    if (!model.manages(p)) continue;
    const auto& parameter = model.parameters()[static_cast<size_t>(p)];
    const std::string label = target.key + "/" + parameter.name;
    const auto* stored = take(names, {parameter.name, parameter.other_names, parameter.tensor, false}, label);
    if (!stored || !fits(label, *stored, stored_dtype(parameter), parameter.sizes)) continue;
    const auto value = read_shard(file, *stored, shard_view(session, p));
    actions_.push_back([&model, p, value] {
      if (value.numel() > 0) std::memcpy(model.master(p, model.rank()), value.const_data_ptr(), value.nbytes());
    });
  }
  const bool same_world = manifest_.world_size == world_ && !manifest_.ranks_file.empty();
  for (const auto& buffer : model.buffers()) {
    if (!seen_buffers_.insert(buffer.tensor.unsafeGetTensorImpl()).second) continue;
    if (same_world && rank_ > 0) {  // this rank's own; rank 0's is used up all the same
      const auto& ranks = *manifest_.file(manifest_.ranks_file);
      auto own = names_in(ranks);
      const std::string name = rank_name(rank_, target.key + "." + buffer.name);
      if (own.count(name) > 0) {
        take(names, buffer, target.key + "/" + buffer.name);
        copy_into(target.key + "/" + buffer.name, {name, {}, buffer.tensor, false}, ranks, own);
        continue;
      }
    }
    copy_into(target.key + "/" + buffer.name, buffer, file, names);
  }
  report_rest(target.key, file, names);
  match_options(target, entry);
  match_state(target, entry);
  actions_.push_back(
      [&session, counts = optim::Session::StepCounts{entry.optimizer->steps, entry.optimizer->skipped_steps}] {
        session.set_step_counts(counts);
      });
}

void Matching::match_state(const Target& target, const StoredEntry& entry) {
  auto& session = *target.session;
  auto& model = session.model();
  const auto& file = *manifest_.file(entry.state_file);
  auto states = states_in(file);
  for (int64_t p = 0; p < model.size(); ++p) {
    if (!model.manages(p)) continue;
    const auto& parameter = model.parameters()[static_cast<size_t>(p)];
    auto found = states.end();
    for (const auto& name : all_names(parameter)) {
      if (found == states.end()) found = states.find(name);
    }
    if (found == states.end()) {  // it was never stepped
      if (parameter.group >= 0) actions_.push_back([&session, p] { session.set_state(p, nullptr); });
      continue;
    }
    const auto stored = std::move(found->second);
    const std::string name = found->first;
    states.erase(found);
    const auto view = shard_view(session, p);
    std::vector<optim::StateField> fields;
    at::Tensor step;
    bool right = parameter.group >= 0;
    for (const auto& [field, tensor] : stored.fields) {
      const std::string label = target.key + "/" + tensor->name;
      if (parameter.group < 0 || !optim::has_state_field(session.kind(), field)) {
        unexpected(label);
        continue;
      }
      if (field == "step") {
        if ((right &= fits(label, *tensor, at::kLong, {}))) step = read_whole(file, *tensor);
      } else if ((right &= fits(label, *tensor, stored_dtype(parameter), parameter.sizes))) {
        fields.push_back({field, read_shard(file, *tensor, view)});
      }
    }
    if (!right) continue;
    actions_.push_back([&session, p, fields, step] {
      const auto count = step.defined() ? std::optional(*step.const_data_ptr<int64_t>()) : std::nullopt;
      session.set_state(p, optim::make_state(session.kind(), count, fields));
    });
  }
  for (const auto& [name, state] : states) {
    for (const auto& [field, tensor] : state.fields) unexpected(target.key + "/" + tensor->name);
  }
}

void Matching::match_options(const Target& target, const StoredEntry& entry) {
  auto& session = *target.session;
  std::unordered_map<std::string, const StoredGroup*> stored;
  for (const auto& group : entry.optimizer->groups) {
    for (const auto& name : group.parameters) stored[name] = &group;
  }
  for (size_t g = 0; g < session.members().size(); ++g) {
    const StoredGroup* found = nullptr;
    std::string of;
    for (const int64_t p : session.members()[g]) {
      const auto& parameter = session.model().parameters()[static_cast<size_t>(p)];
      const StoredGroup* theirs = nullptr;
      for (const auto& name : all_names(parameter)) {
        if (!theirs && stored.count(name) > 0) theirs = stored[name];
      }
      if (!theirs) {
        missing(target.key + "/param_groups." + parameter.name);
        continue;
      }
      if (found && found->options != theirs->options) {
        others_.push_back("'" + target.key + "/param_groups." + parameter.name +
                          "' (it has other options in the checkpoint than '" + of +
                          "', the program has both in one group)");
      }
      if (!found) of = parameter.name;
      found = theirs;
    }
    if (!found) continue;
    std::vector<optim::OptionField> fields;
    for (const auto& option : found->options) fields.push_back({option.name, option.value, option.is_flag});
    auto& options = session.group_options(static_cast<int64_t>(g));
    try {
      optim::set_option_fields(*options.clone(), fields);
    } catch (const std::exception& error) {
      others_.push_back("'" + target.key + "' (" + comm::text_of(error) + ")");
    }
    actions_.push_back([&options, fields] { optim::set_option_fields(options, fields); });
  }
}

}  // namespace trueshard::checkpoint
