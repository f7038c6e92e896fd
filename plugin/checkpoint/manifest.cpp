// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/manifest.h"

#include <unordered_set>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/manifest_json.h"
#include "plugin/checkpoint/safetensors.h"

namespace trueshard::checkpoint {

namespace {

constexpr const char* kFormat = "trueshard checkpoint";
constexpr int kManifestDepth = 12;
constexpr int64_t kMostManifestBytes = 256'000'000;
constexpr std::string_view kSeal = ",\n\"crc32c\":\"";  // then eight hexadecimal digits and kEnd
constexpr std::string_view kEnd = "\"}\n";

struct KindName {
  EntryKind kind;
  const char* name;
};
constexpr KindName kKinds[] = {
    {EntryKind::kOptimizer, "optimizer"}, {EntryKind::kModule, "module"},   {EntryKind::kScaler, "grad_scaler"},
    {EntryKind::kScheduler, "scheduler"}, {EntryKind::kInteger, "integer"}, {EntryKind::kNumber, "number"},
    {EntryKind::kFlag, "flag"},           {EntryKind::kText, "text"},       {EntryKind::kTensor, "tensor"},
};

// The text without its seal, or an error.
std::string_view open_seal(std::string_view text, const std::string& where) {
  const size_t tail = kSeal.size() + 8 + kEnd.size();
  const std::string advice = "; it was changed or cut off after it was written";
  if (text.size() < tail || text.substr(text.size() - kEnd.size()) != kEnd ||
      text.substr(text.size() - tail, kSeal.size()) != kSeal)
    throw FormatError(where + " does not end with its checksum" + advice);
  const std::string_view body = text.substr(0, text.size() - tail);
  const std::string sum = hex32(crc32c(body.data(), body.size()));
  const auto stored = text.substr(text.size() - kEnd.size() - 8, 8);
  if (sum != stored) throw FormatError(where + " has checksum " + sum + ", it says " + std::string(stored) + advice);
  return body;
}

void require_consistent(const Manifest& manifest, const std::string& where) {
  std::unordered_set<std::string> names, keys;
  for (const StoredFile& file : manifest.files) {
    require_plain_name(file.name, where);
    if (file.name == kManifestName || !names.insert(file.name).second)
      throw FormatError(where + ": file '" + file.name + "' is listed twice");
    std::unordered_set<std::string> tensors;
    for (const StoredTensor& tensor : file.tensors) {
      if (!tensors.insert(tensor.name).second)
        throw FormatError(where + ": tensor '" + tensor.name + "' of '" + file.name + "' is listed twice");
    }
  }
  const auto require_listed = [&](const std::string& file, const std::string& whose) {
    if (names.count(file) == 0)
      throw FormatError(where + ": '" + whose + "' refers to file '" + file + "', which is not listed");
  };
  if (!manifest.ranks_file.empty()) require_listed(manifest.ranks_file, "ranks");
  for (const StoredEntry& entry : manifest.entries) {
    if (!keys.insert(entry.key).second) throw FormatError(where + ": entry '" + entry.key + "' is there twice");
    if (has_file(entry.kind)) require_listed(entry.file, entry.key);
    if (entry.kind == EntryKind::kOptimizer) require_listed(entry.state_file, entry.key);
  }
}

void compare_with_file(const StoredFile& stored, const File& file) {
  const std::string where = "'" + file.path() + "'";
  if (file.size() != stored.bytes) {
    throw FormatError(where + " has " + std::to_string(file.size()) + " bytes, the manifest says " +
                      std::to_string(stored.bytes) + "; it is truncated or of another save");
  }
  std::string bytes;
  const Header header = read_header(file, &bytes);
  if (crc32c(bytes.data(), bytes.size()) != stored.header_crc32c)
    throw FormatError(where + " has another header than the manifest says; it is damaged or of another save");
  bool same = header.tensors.size() == stored.tensors.size();
  for (size_t i = 0; same && i < header.tensors.size(); ++i) {
    const auto& a = header.tensors[i];
    const auto& b = stored.tensors[i];
    same = a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
  }
  if (!same) throw FormatError(where + " holds other tensors than the manifest says; it is of another save");
}

}  // namespace

const char* name_of(EntryKind kind) {
  for (const auto& each : kKinds) {
    if (each.kind == kind) return each.name;
  }
  return "";
}
EntryKind kind_named(const Field& field) {
  const std::string name = field.text();
  for (const auto& each : kKinds) {
    if (name == each.name) return each.kind;
  }
  field.refuse("a kind this version knows");
}

std::string hex32(uint32_t value) {
  std::string text(8, '0');
  for (size_t i = 8; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

const StoredFile* Manifest::file(const std::string& name) const {
  for (const auto& each : files) {
    if (each.name == name) return &each;
  }
  return nullptr;
}
const StoredEntry* Manifest::entry(const std::string& key) const {
  for (const auto& each : entries) {
    if (each.key == key) return &each;
  }
  return nullptr;
}
int64_t Manifest::step() const {
  for (const auto& each : entries) {
    if (each.optimizer) return each.optimizer->steps;
  }
  return 0;
}

std::string to_text(const Manifest& manifest) {
  Json json = {{"format", kFormat},
               {"format_version", kFormatVersion},
               {"library_version", manifest.library_version},
               {"torch_version", manifest.torch_version},
               {"id", manifest.id},
               {"world_size", manifest.world_size},
               {"step", manifest.step()},
               {"ranks_file", manifest.ranks_file}};
  json["entries"] = entries_to_json(manifest);
  json["files"] = files_to_json(manifest);
  std::string text = json.dump(1);
  text.resize(text.rfind('}'));
  while (text.back() == '\n' || text.back() == ' ') text.pop_back();
  const std::string sum = hex32(crc32c(text.data(), text.size()));
  return text + std::string(kSeal) + sum + std::string(kEnd);
}

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const std::string body = std::string(open_seal(text, where)) + "}";
  const Json json = parse_json(body, kManifestDepth, where);
  const Field root(json, where);
  if (root["format"].text() != kFormat) root["format"].refuse(std::string("'") + kFormat + "'");
  if (root["format_version"].integer(1) != kFormatVersion)
    root["format_version"].refuse("version " + std::to_string(kFormatVersion) + "; a newer trueshard wrote it");
  Manifest manifest;
  manifest.library_version = root["library_version"].text();
  manifest.torch_version = root["torch_version"].text();
  manifest.id = root["id"].text();
  manifest.world_size = root["world_size"].integer(1);
  manifest.ranks_file = root["ranks_file"].text();
  entries_from_json(root["entries"], manifest);
  files_from_json(root["files"], manifest);
  require_consistent(manifest, where);
  return manifest;
}

Manifest read_manifest(const Folder& folder) {
  const std::string where = "'" + folder.path() + "/" + kManifestName + "'";
  if (!folder.contains(kManifestName)) {
    throw FormatError("'" + folder.path() + "' is not a trueshard checkpoint: it has no " + kManifestName +
                      " (weights from elsewhere: trueshard::load_weights)");
  }
  const File file = folder.open_file(kManifestName);
  const int64_t bytes = file.size();
  if (bytes > kMostManifestBytes)
    throw FormatError(where + " has " + std::to_string(bytes) + " bytes; expected 256 MB at most");
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read(text.data(), bytes, 0);
  Manifest manifest = parse_manifest(text, where);
  for (const StoredFile& stored : manifest.files) compare_with_file(stored, folder.open_file(stored.name));
  return manifest;
}

}  // namespace trueshard::checkpoint
