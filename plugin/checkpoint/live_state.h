// SPDX-License-Identifier: BSD-3-Clause
// Role: the running program as a save or a load sees it: named things (Target) and the tensors in them (LiveTensor).
// Invariants: I1 the list of tensors, their names, shapes and files are the same on all ranks; what differs is which
// elements this rank holds. I2 a tensor appears once, under its first name, with the others beside it. I3 names and
// shapes are those of the untouched module; padding does not appear.
// Shapes: offsets are elements of the tensor in row-major order, unless a name says bytes.
// Threads: one. Errors: c10::Error naming the target.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/safetensors.h"
#include "plugin/engine/module_view.h"
#include "plugin/optim/session.h"

namespace trueshard::checkpoint {

struct Target {
  std::string key;
  EntryKind kind = EntryKind::kInteger;
  optim::Session* session = nullptr;           // kOptimizer
  std::function<engine::ModuleView()> module;  // kModule
  at::Tensor* tensor = nullptr;                // kTensor
  // Everything else: into the manifest and back. check() throws when apply() could not do what it says.
  std::function<void(StoredEntry&)> describe;
  std::function<void(const StoredEntry&)> check, apply;
};

Dtype dtype_of(c10::ScalarType dtype);  // throws for one that the format does not know
c10::ScalarType scalar_type_of(Dtype dtype);

// The one group of all targets that have one; null: the program runs alone.
std::shared_ptr<comm::Transport> transport_of(const std::vector<Target>& targets);

// How a sharded parameter lies on this rank. Memory order is the order of its strides.
struct ShardView {
  std::vector<int64_t> sizes, strides;
  plan::Range owned;      // elements in memory order that this rank holds
  plan::Range piece;      // those of them that it answers for: every element has one such rank
  bool row_major = true;  // memory order is the order of the file
};
ShardView shard_view(const optim::Session& session, int64_t parameter);
c10::ScalarType stored_dtype(const engine::Parameter& parameter);

// Names of files.
struct FileNames {
  std::string model, state;
};
FileNames file_names(const std::vector<Target>& targets, const Target& target);
inline constexpr const char* kValuesFile = "values.safetensors";
inline constexpr const char* kRanksFile = "ranks.safetensors";
std::string state_name(const std::string& parameter, const std::string& field);  // "state.<parameter>.<field>"
std::string rank_name(int rank, const std::string& what);                        // "rank.<rank>.<what>"

StoredOptimizer describe_optimizer(optim::Session& session);

}  // namespace trueshard::checkpoint
