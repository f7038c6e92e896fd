// SPDX-License-Identifier: BSD-3-Clause
// Role: what a checkpoint says about itself: manifest.json, written last.
// Invariants: I1 reading is strict: everything that is used later was checked here, file names stay inside the folder.
// I2 the last member is the CRC-32C of all text before it. I3 numbers come back bit-exact.
// Threads: pure functions. Errors: FormatError naming the file and the member.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "plugin/checkpoint/files.h"

namespace trueshard::checkpoint {

constexpr const char* kManifestName = "manifest.json";
constexpr int64_t kFormatVersion = 1;

struct StoredTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  uint32_t crc32c = 0;
  std::vector<std::string> other_names;  // a tied tensor is stored once
};

struct StoredFile {
  std::string name;
  int64_t bytes = 0;
  uint32_t header_crc32c = 0;  // of the bytes before the data
  std::vector<StoredTensor> tensors;
};

struct StoredOption {  // of an optimizer group
  std::string name;
  double value = 0;
  bool is_flag = false;
  bool operator==(const StoredOption&) const = default;
};
struct StoredGroup {
  std::vector<StoredOption> options;
  std::vector<std::string> parameters;
};

struct StoredOptimizer {
  std::string type;  // "AdamW"
  std::vector<StoredGroup> groups;
  int64_t steps = 0, skipped_steps = 0;
  // How it was sharded; nothing depends on it when loading.
  int64_t stage = 0, bucket_bytes = 0;
  std::string param_dtype;  // of the policy; empty: none
};

struct StoredScaler {
  bool enabled = true;
  double scale = 0, growth_factor = 0, backoff_factor = 0;
  int64_t growth_interval = 0, growth_tracker = 0, skipped_steps = 0, bounds_hit = 0;
};

enum class EntryKind { kOptimizer, kModule, kScaler, kScheduler, kInteger, kNumber, kFlag, kText, kTensor };
const char* name_of(EntryKind kind);

struct StoredEntry {
  std::string key;
  EntryKind kind = EntryKind::kInteger;
  std::string file;                                     // kOptimizer, kModule, kTensor: of the weights or of the tensor
  std::string state_file;                               // kOptimizer
  std::vector<std::string> frozen_parameters, buffers;  // kOptimizer, kModule
  std::optional<StoredOptimizer> optimizer;
  std::optional<StoredScaler> scaler;
  int64_t integer = 0;  // kInteger, kScheduler
  double number = 0;
  bool flag = false;
  std::string text;
};

struct Manifest {
  std::string library_version, torch_version;
  std::string id;  // of this save
  int64_t world_size = 1;
  std::string ranks_file;  // each rank's generator and buffers; empty: none
  std::vector<StoredFile> files;
  std::vector<StoredEntry> entries;

  const StoredFile* file(const std::string& name) const;
  const StoredEntry* entry(const std::string& key) const;
  int64_t step() const;  // steps of the first optimizer, 0 without one
};

std::string to_text(const Manifest& manifest);
std::string describe(const StoredEntry& entry);  // one line
Manifest parse_manifest(std::string_view text, const std::string& where);
// Also compares sizes, headers and checksums of headers with the files, which must be in the folder.
Manifest read_manifest(const Folder& folder);

}  // namespace trueshard::checkpoint
