// SPDX-License-Identifier: BSD-3-Clause
// Role: which stored tensor goes where in the program, and everything about them that does not fit.
// Invariants: I1 nothing of the program is changed here; what will be done is kept as actions. I2 the parts to be read,
// and their order, are the same on all ranks. Threads: one. Errors: none thrown; problems() has them.
#pragma once
#include <functional>
#include <map>
#include <unordered_set>

#include "plugin/checkpoint/load.h"
#include "plugin/checkpoint/part.h"

namespace trueshard::checkpoint {

struct Reading {  // one stored tensor, of which this rank reads `part` into memory of its own
  const StoredTensor* stored = nullptr;
  Part part;
  bool whole = false;  // every rank that wants it reads all of it
};

// Whether a name is among those given; a last '*' stands for any rest.
bool is_listed(const std::vector<std::string>& patterns, const std::string& name);

class Matching {
 public:
  Matching(const LoadRequest& request, const Manifest& manifest, int rank, int world);

  const std::string& problems() const { return problems_; }  // empty: everything fits
  std::vector<Reading>& readings() { return readings_; }
  void apply();  // after everything was read and verified

 private:
  struct Stored;  // names of one entry's tensors
  void match(const Target& target);
  void match_optimizer(const Target& target, const StoredEntry& entry);
  void match_state(const Target& target, const StoredEntry& entry);
  void match_options(const Target& target, const StoredEntry& entry);
  void match_module(const Target& target, const StoredEntry& entry);
  void match_generator();
  using Names = std::map<std::string, const StoredTensor*>;  // aliases included
  static Names names_in(const StoredFile& file);
  at::Tensor read_whole(const StoredFile& file, const StoredTensor& stored);
  // This rank's elements, in memory order.
  at::Tensor read_shard(const StoredFile& file, const StoredTensor& stored, const ShardView& view);
  void copy_into(const std::string& label, const engine::NamedTensor& named, const StoredFile& file, Names& names);
  const StoredTensor* take(Names& names, const engine::NamedTensor& named, const std::string& label);
  bool fits(const std::string& label, const StoredTensor& stored, c10::ScalarType dtype, at::IntArrayRef sizes);
  void missing(const std::string& label);
  void unexpected(const std::string& label);
  void report_rest(const std::string& key, const StoredFile& file, const Names& names);

  const LoadRequest& request_;
  const Manifest& manifest_;
  int rank_, world_;
  std::vector<Reading> readings_;
  std::unordered_set<const c10::TensorImpl*> seen_buffers_;  // of a module that several optimizers share
  std::vector<std::function<void()>> actions_;
  std::vector<std::string> missing_, unexpected_, others_;
  std::string problems_;
};

}  // namespace trueshard::checkpoint
