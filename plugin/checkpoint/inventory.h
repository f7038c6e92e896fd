// SPDX-License-Identifier: BSD-3-Clause
// Role: lists everything that a save stores: the tensors of all files, this rank's parts of them, and the manifest.
// Invariants: those of live_state.h. Threads: one. Errors: c10::Error for what can not be stored, naming it.
#pragma once
#include <map>
#include <unordered_set>

#include "plugin/checkpoint/part.h"

namespace trueshard::checkpoint {

struct Inventory {
  struct ListedFile {
    std::vector<TensorInfo> tensors;
    std::map<std::string, std::string> metadata;
    std::map<std::string, std::vector<std::string>> other_names;  // of tied tensors
  };
  std::map<std::string, ListedFile> files;
  std::vector<Part> parts;
  std::vector<StoredEntry> entries;
};

Inventory take_inventory(const std::vector<Target>& targets, int rank, int world);

}  // namespace trueshard::checkpoint
