// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/manifest_json.h"

#include <unordered_set>

namespace trueshard::checkpoint {

namespace {

Json optimizer_to_json(const StoredOptimizer& optimizer) {
  Json groups = Json::array();
  for (const StoredGroup& group : optimizer.groups) {
    Json options = Json::object();
    for (const StoredOption& option : group.options)
      options[option.name] = option.is_flag ? Json(option.value != 0) : number_json(option.value);
    groups.push_back({{"options", options}, {"parameters", group.parameters}});
  }
  return {
      {"type", optimizer.type},
      {"groups", groups},
      {"steps", optimizer.steps},
      {"skipped_steps", optimizer.skipped_steps},
      {"plan",
       {{"stage", optimizer.stage}, {"bucket_bytes", optimizer.bucket_bytes}, {"param_dtype", optimizer.param_dtype}}}};
}

StoredOptimizer optimizer_from_json(const Field& field) {
  StoredOptimizer optimizer;
  optimizer.type = field["type"].text();
  optimizer.steps = field["steps"].integer(0);
  optimizer.skipped_steps = field["skipped_steps"].integer(0);
  const Field plan = field["plan"];
  optimizer.stage = plan["stage"].integer(0);
  optimizer.bucket_bytes = plan["bucket_bytes"].integer(1);
  optimizer.param_dtype = plan["param_dtype"].text();
  std::unordered_set<std::string> seen;
  for (const Json& each : field["groups"].array()) {
    const Field group(each, field.path() + ".groups");
    StoredGroup stored;
    for (const auto& item : group["options"].object().items()) {
      const Field option(item.value(), group.path() + "." + item.key());
      const bool is_flag = item.value().is_boolean();
      stored.options.push_back({item.key(), is_flag ? (option.flag() ? 1.0 : 0.0) : option.number(), is_flag});
    }
    stored.parameters = group["parameters"].texts();
    for (const std::string& name : stored.parameters) {
      if (!seen.insert(name).second) throw FormatError(group.path() + ": parameter '" + name + "' is in two groups");
    }
    optimizer.groups.push_back(std::move(stored));
  }
  return optimizer;
}

Json scaler_to_json(const StoredScaler& scaler) {
  return {{"enabled", scaler.enabled},
          {"scale", number_json(scaler.scale)},
          {"growth_factor", number_json(scaler.growth_factor)},
          {"backoff_factor", number_json(scaler.backoff_factor)},
          {"growth_interval", scaler.growth_interval},
          {"growth_tracker", scaler.growth_tracker},
          {"skipped_steps", scaler.skipped_steps},
          {"bounds_hit", scaler.bounds_hit}};
}

StoredScaler scaler_from_json(const Field& field) {
  StoredScaler scaler;
  scaler.enabled = field["enabled"].flag();
  scaler.scale = field["scale"].number();
  scaler.growth_factor = field["growth_factor"].number();
  scaler.backoff_factor = field["backoff_factor"].number();
  scaler.growth_interval = field["growth_interval"].integer(1);
  scaler.growth_tracker = field["growth_tracker"].integer(0);
  scaler.skipped_steps = field["skipped_steps"].integer(0);
  scaler.bounds_hit = field["bounds_hit"].integer(0);
  return scaler;
}

}  // namespace

bool has_file(EntryKind kind) {
  return kind == EntryKind::kOptimizer || kind == EntryKind::kModule || kind == EntryKind::kTensor;
}

Json entry_to_json(const StoredEntry& entry) {
  Json json = {{"kind", name_of(entry.kind)}};
  if (has_file(entry.kind)) json["file"] = entry.file;
  switch (entry.kind) {
    case EntryKind::kOptimizer:
      json["state_file"] = entry.state_file;
      json["optimizer"] = optimizer_to_json(*entry.optimizer);
      [[fallthrough]];
    case EntryKind::kModule:
      json["frozen_parameters"] = entry.frozen_parameters;
      json["buffers"] = entry.buffers;
      break;
    case EntryKind::kScaler:
      json["scaler"] = scaler_to_json(*entry.scaler);
      break;
    case EntryKind::kScheduler:
    case EntryKind::kInteger:
      json["value"] = entry.integer;
      break;
    case EntryKind::kNumber:
      json["value"] = number_json(entry.number);
      break;
    case EntryKind::kFlag:
      json["value"] = entry.flag;
      break;
    case EntryKind::kText:
      json["value"] = entry.text;
      break;
    case EntryKind::kTensor:
      break;
  }
  return json;
}

std::string describe(const StoredEntry& entry) { return "'" + entry.key + "' " + entry_to_json(entry).dump(); }

namespace {

StoredEntry entry_from_json(const std::string& key, const Field& field) {
  StoredEntry entry;
  entry.key = key;
  entry.kind = kind_named(field["kind"]);
  if (has_file(entry.kind)) entry.file = field["file"].text();
  switch (entry.kind) {
    case EntryKind::kOptimizer:
      entry.state_file = field["state_file"].text();
      entry.optimizer = optimizer_from_json(field["optimizer"]);
      [[fallthrough]];
    case EntryKind::kModule:
      entry.frozen_parameters = field["frozen_parameters"].texts();
      entry.buffers = field["buffers"].texts();
      break;
    case EntryKind::kScaler:
      entry.scaler = scaler_from_json(field["scaler"]);
      break;
    case EntryKind::kScheduler:
    case EntryKind::kInteger:
      entry.integer = field["value"].integer(INT64_MIN);
      break;
    case EntryKind::kNumber:
      entry.number = field["value"].number();
      break;
    case EntryKind::kFlag:
      entry.flag = field["value"].flag();
      break;
    case EntryKind::kText:
      entry.text = field["value"].text();
      break;
    case EntryKind::kTensor:
      break;
  }
  return entry;
}

uint32_t sum_from(const Field& field) {
  const std::string text = field.text();
  if (text.size() != 8 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    field.refuse("eight hexadecimal digits");
  return static_cast<uint32_t>(std::stoul(text, nullptr, 16));
}

StoredTensor tensor_from_json(const Field& field) {
  StoredTensor tensor;
  tensor.name = field["name"].text();
  const auto dtype = dtype_named(field["dtype"].text());
  if (!dtype) field["dtype"].refuse("a dtype of the safetensors format");
  tensor.dtype = *dtype;
  tensor.shape = field["shape"].shape();
  if (!elements_of(tensor.shape, itemsize(tensor.dtype)))
    field["shape"].refuse("a shape whose bytes can be counted in 63 bits");
  tensor.crc32c = sum_from(field["crc32c"]);
  if (field.has("other_names")) tensor.other_names = field["other_names"].texts();
  return tensor;
}

}  // namespace

Json entries_to_json(const Manifest& manifest) {
  Json json = Json::object();
  for (const StoredEntry& entry : manifest.entries) json[entry.key] = entry_to_json(entry);
  return json;
}

Json files_to_json(const Manifest& manifest) {
  Json files = Json::array();
  for (const StoredFile& file : manifest.files) {
    Json tensors = Json::array();
    for (const StoredTensor& tensor : file.tensors) {
      tensors.push_back({{"name", tensor.name},
                         {"dtype", name_of(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"crc32c", hex32(tensor.crc32c)}});
      if (!tensor.other_names.empty()) tensors.back()["other_names"] = tensor.other_names;
    }
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"header_crc32c", hex32(file.header_crc32c)},
                     {"tensors", tensors}});
  }
  return files;
}

void entries_from_json(const Field& field, Manifest& manifest) {
  for (const auto& item : field.object().items())
    manifest.entries.push_back(entry_from_json(item.key(), Field(item.value(), field.path() + "." + item.key())));
}

void files_from_json(const Field& field, Manifest& manifest) {
  for (const Json& each : field.array()) {
    const Field item(each, field.path());
    StoredFile file;
    file.name = item["name"].text();
    file.bytes = item["bytes"].integer(8);
    file.header_crc32c = sum_from(item["header_crc32c"]);
    for (const Json& tensor : item["tensors"].array())
      file.tensors.push_back(tensor_from_json(Field(tensor, item.path() + " '" + file.name + "'")));
    manifest.files.push_back(std::move(file));
  }
}

}  // namespace trueshard::checkpoint
