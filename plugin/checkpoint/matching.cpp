// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/matching.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

namespace trueshard::checkpoint {

namespace {

std::string list_of(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return {};
  constexpr size_t kShown = 8;
  std::string text = title;
  for (size_t i = 0; i < names.size() && i < kShown; ++i) text += (i > 0 ? ", " : " ") + names[i];
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text + "; ";
}

void copy_quietly(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  to.detach().copy_(from);
}

}  // namespace

bool is_listed(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    if (!pattern.empty() && pattern.back() == '*')
      return name.compare(0, pattern.size() - 1, pattern, 0, pattern.size() - 1) == 0;
    return name == pattern;
  });
}

Matching::Matching(const LoadRequest& request, const Manifest& manifest, int rank, int world)
    : request_(request), manifest_(manifest), rank_(rank), world_(world) {
  std::set<std::string> keys;
  bool sharded = false;
  for (const auto& target : request_.targets) {
    keys.insert(target.key);
    sharded |= target.session != nullptr;
    match(target);
  }
  for (const auto& entry : manifest_.entries) {
    if (keys.count(entry.key) == 0) unexpected(entry.key);
  }
  if (sharded) match_generator();
  problems_ = list_of("missing in the checkpoint:", missing_) + list_of("not in the program:", unexpected_) +
              list_of("different:", others_);
  if (!problems_.empty()) {
    problems_ = "'" + request_.folder + "' and the program do not fit: " + problems_ +
                "nothing was loaded. Names given to LoadOptions().allow_missing() and allow_unexpected() are let pass";
  }
}

void Matching::apply() {
  for (const auto& action : actions_) action();
}

void Matching::missing(const std::string& label) {
  if (!is_listed(request_.allow_missing, label)) missing_.push_back("'" + label + "'");
}
void Matching::unexpected(const std::string& label) {
  if (!is_listed(request_.allow_unexpected, label)) unexpected_.push_back("'" + label + "'");
}

void Matching::match(const Target& target) {
  const StoredEntry* entry = manifest_.entry(target.key);
  if (!entry) return missing(target.key);
  const bool weights_only = target.kind == EntryKind::kModule && entry->kind == EntryKind::kOptimizer;
  if (entry->kind != target.kind && !weights_only) {
    others_.push_back("'" + target.key + "' (" + name_of(entry->kind) + " in the checkpoint, " + name_of(target.kind) +
                      " in the program)");
    return;
  }
  switch (target.kind) {
    case EntryKind::kOptimizer:
      return match_optimizer(target, *entry);
    case EntryKind::kModule:
      return match_module(target, *entry);
    case EntryKind::kTensor: {
      auto& into = *target.tensor;
      const auto names = names_in(*manifest_.file(entry->file));
      const auto found = names.find(target.key);
      if (found == names.end()) return missing(target.key);
      if (into.defined() && !fits(target.key, *found->second, into.scalar_type(), into.sizes())) return;
      const auto value = read_whole(*manifest_.file(entry->file), *found->second);
      actions_.push_back([&into, value] {
        if (!into.defined()) into = value;
        if (!into.is_same(value)) copy_quietly(into, value);
      });
      return;
    }
    default:
      try {
        target.check(*entry);
      } catch (const std::exception& error) {
        others_.push_back("'" + target.key + "' (" + comm::text_of(error) + ")");
      }
      actions_.push_back([&target, entry] { target.apply(*entry); });
  }
}

Matching::Names Matching::names_in(const StoredFile& file) {
  Names names;
  for (const auto& tensor : file.tensors) {
    names[tensor.name] = &tensor;
    for (const auto& other : tensor.other_names) names.emplace(other, &tensor);
  }
  return names;
}

// The stored tensor of a program's tensor, by any of its names; all names of both are used up.
const StoredTensor* Matching::take(Names& names, const engine::NamedTensor& named, const std::string& label) {
  const StoredTensor* found = nullptr;
  std::vector<std::string> ours = named.other_names;
  ours.insert(ours.begin(), named.name);
  for (const auto& name : ours) {
    const auto at = names.find(name);
    if (at == names.end() || found) continue;
    found = at->second;
  }
  if (!found) {
    missing(label);
    return nullptr;
  }
  std::erase_if(names, [&](const auto& each) { return each.second == found; });
  return found;
}

bool Matching::fits(const std::string& label, const StoredTensor& stored, c10::ScalarType dtype,
                    at::IntArrayRef sizes) {
  if (scalar_type_of(stored.dtype) == dtype && sizes == stored.shape) return true;
  std::string ours;
  try {
    ours = name_of(dtype_of(dtype));
  } catch (const std::exception&) {
    ours = c10::toString(dtype);
  }
  others_.push_back("'" + label + "' (" + name_of(stored.dtype) + " " + describe_shape(stored.shape) +
                    " in the checkpoint, " + ours + " " + describe_shape(sizes.vec()) + " in the program)");
  return false;
}

void Matching::report_rest(const std::string& key, const StoredFile& file, const Names& names) {
  for (const auto& tensor : file.tensors) {
    if (names.count(tensor.name) > 0) unexpected(key + "/" + tensor.name);
  }
}

at::Tensor Matching::read_whole(const StoredFile& file, const StoredTensor& stored) {
  auto value = at::empty(stored.shape, at::TensorOptions().dtype(scalar_type_of(stored.dtype)));
  Reading reading;
  reading.stored = &stored;
  reading.whole = true;
  reading.part = {file.name,
                  stored.name,
                  0,
                  static_cast<int64_t>(value.nbytes()),
                  static_cast<std::byte*>(value.data_ptr()),
                  value,
                  {},
                  itemsize(stored.dtype)};
  readings_.push_back(std::move(reading));
  return value;
}

at::Tensor Matching::read_shard(const StoredFile& file, const StoredTensor& stored, const ShardView& view) {
  const int64_t item = itemsize(stored.dtype);
  auto value = at::empty({view.owned.size()}, at::TensorOptions().dtype(scalar_type_of(stored.dtype)));
  Reading reading;
  reading.stored = &stored;
  reading.part = {file.name,
                  stored.name,
                  view.owned.begin * item,
                  view.owned.end * item,
                  static_cast<std::byte*>(value.data_ptr()),
                  value,
                  {},
                  item};
  const int64_t numel = elements_of(stored.shape, item).value_or(0);
  reading.whole = !view.row_major || view.owned.size() == numel;
  if (!view.row_major) reading.part.view = std::make_shared<ShardView>(view);
  readings_.push_back(std::move(reading));
  return value;
}

void Matching::copy_into(const std::string& label, const engine::NamedTensor& named, const StoredFile& file,
                         Names& names) {
  const StoredTensor* stored = take(names, named, label);
  if (!stored || !fits(label, *stored, named.tensor.scalar_type(), named.tensor.sizes())) return;
  const auto value = read_whole(file, *stored);
  actions_.push_back([to = named.tensor, value] { copy_quietly(to, value); });
}

void Matching::match_module(const Target& target, const StoredEntry& entry) {
  const auto& file = *manifest_.file(entry.file);
  auto names = names_in(file);
  const auto module = target.module();
  for (const auto& parameter : module.parameters) copy_into(target.key + "/" + parameter.name, parameter, file, names);
  for (const auto& buffer : module.buffers) copy_into(target.key + "/" + buffer.name, buffer, file, names);
  report_rest(target.key, file, names);
}

void Matching::match_generator() {
  if (manifest_.world_size != world_ || manifest_.ranks_file.empty()) return;
  const auto& file = *manifest_.file(manifest_.ranks_file);
  const auto names = names_in(file);
  for (int r = 0; r < world_; ++r) {
    const auto found = names.find(rank_name(r, "generator"));
    if (found == names.end()) return missing(rank_name(r, "generator"));
    if (r != rank_) continue;
    const auto state = read_whole(file, *found->second);
    actions_.push_back([state] {
      auto generator = at::globalContext().defaultGenerator(at::kCPU);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    });
  }
}

}  // namespace trueshard::checkpoint
