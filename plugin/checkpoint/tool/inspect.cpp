// SPDX-License-Identifier: BSD-3-Clause
#include <cstdio>
#include <iostream>

#include "plugin/checkpoint/archive.h"
#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/manifest_json.h"
#include "plugin/checkpoint/tool/commands.h"

namespace trueshard::checkpoint::tool {

std::string describe_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < std::size(kUnits); ++unit) value /= 1000;
  char text[40];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

Progress::Progress(const char* what, int64_t total_bytes, bool shown)
    : what_(what), total_(total_bytes), shown_(shown) {}
Progress::~Progress() {
  if (shown_ && percent_ >= 0) std::fprintf(stderr, "\r%*s\r", 60, "");
}
void Progress::advance(int64_t bytes) {
  done_ += bytes;
  const int64_t percent = total_ > 0 ? done_ * 100 / total_ : 100;
  if (!shown_ || percent == percent_) return;
  percent_ = percent;
  std::fprintf(stderr, "\r%s %3lld %% of %s", what_, static_cast<long long>(percent), describe_bytes(total_).c_str());
}

namespace {

int64_t total_bytes(const Archive& archive) {
  int64_t bytes = 0;
  for (const auto& tensor : archive.tensors()) bytes += tensor.bytes();
  return bytes;
}

Json tensor_json(const ArchivedTensor& tensor) {
  Json json = {{"name", tensor.name},
               {"file", tensor.pieces[0].file},
               {"dtype", name_of(tensor.dtype)},
               {"shape", tensor.shape},
               {"bytes", tensor.bytes()}};
  if (tensor.crc32c) json["crc32c"] = hex32(*tensor.crc32c);
  return json;
}

struct FileSummary {
  int64_t tensors = 0, bytes = 0;
  std::map<std::string, int64_t> elements;  // by dtype
};
std::map<std::string, FileSummary> summaries(const Archive& archive) {
  std::map<std::string, FileSummary> files;
  for (const auto& tensor : archive.tensors()) {
    auto& file = files[tensor.pieces[0].file];
    ++file.tensors;
    file.bytes += tensor.bytes();
    file.elements[name_of(tensor.dtype)] += tensor.bytes() / itemsize(tensor.dtype);
  }
  return files;
}

Json summary_json(const Archive& archive, bool all_tensors) {
  Json json = {{"ok", true}, {"path", archive.path()}, {"bytes", total_bytes(archive)}};
  if (const auto& manifest = archive.manifest()) {
    json["library_version"] = manifest->library_version;
    json["torch_version"] = manifest->torch_version;
    json["world_size"] = manifest->world_size;
    json["step"] = manifest->step();
    json["entries"] = entries_to_json(*manifest);
  }
  for (const auto& [name, file] : summaries(archive))
    json["files"].push_back(
        {{"name", name}, {"tensors", file.tensors}, {"bytes", file.bytes}, {"elements", file.elements}});
  if (all_tensors) {
    json["tensors"] = Json::array();
    for (const auto& tensor : archive.tensors()) json["tensors"].push_back(tensor_json(tensor));
  }
  return json;
}

void print_entry(const StoredEntry& entry) {
  std::cout << "  " << entry.key << ": ";
  if (entry.optimizer) {
    const auto& optimizer = *entry.optimizer;
    size_t parameters = 0;
    for (const auto& group : optimizer.groups) parameters += group.parameters.size();
    std::cout << optimizer.type << ", " << optimizer.steps << " steps (" << optimizer.skipped_steps << " skipped), "
              << parameters << " parameters in " << optimizer.groups.size() << " groups, "
              << entry.frozen_parameters.size() << " outside, " << entry.buffers.size() << " buffers\n";
    for (const auto& group : optimizer.groups) {
      std::cout << "    group of " << group.parameters.size() << ":";
      for (const auto& option : group.options) std::cout << ' ' << option.name << ' ' << option.value;
      std::cout << '\n';
    }
  } else if (entry.scaler) {
    std::cout << "scale " << entry.scaler->scale << ", growth tracker " << entry.scaler->growth_tracker << ", "
              << entry.scaler->skipped_steps << " skipped\n";
  } else {
    const Json json = entry_to_json(entry);
    std::cout << name_of(entry.kind) << (json.contains("value") ? " " + json["value"].dump() : "") << '\n';
  }
}

}  // namespace

int inspect(const std::string& path, bool all_tensors, const Output& output) {
  const Archive archive(path);
  if (output.json) {
    std::cout << summary_json(archive, all_tensors).dump(1) << std::endl;
    return 0;
  }
  std::cout << path << ": " << archive.tensors().size() << " tensors, " << describe_bytes(total_bytes(archive)) << '\n';
  if (const auto& manifest = archive.manifest()) {
    std::cout << "step " << manifest->step() << ", saved on " << manifest->world_size << " ranks by trueshard "
              << manifest->library_version << " with torch " << manifest->torch_version << "\nentries\n";
    for (const auto& entry : manifest->entries) print_entry(entry);
  }
  std::cout << "files\n";
  for (const auto& [name, file] : summaries(archive)) {
    std::cout << "  " << name << ": " << file.tensors << " tensors, " << describe_bytes(file.bytes);
    for (const auto& [dtype, elements] : file.elements) std::cout << ", " << elements << " " << dtype;
    std::cout << '\n';
  }
  if (all_tensors) {
    std::cout << "tensors\n";
    for (const auto& tensor : archive.tensors()) {
      std::cout << "  " << tensor.name << ' ' << name_of(tensor.dtype) << ' ' << describe_shape(tensor.shape) << ' '
                << describe_bytes(tensor.bytes()) << '\n';
    }
  }
  return 0;
}

int verify(const std::string& path, const Output& output) {
  Archive archive(path);
  if (!archive.manifest()) throw FormatError("'" + path + "' has no manifest and so no checksums to compare");
  std::vector<std::string> bad;
  {
    Progress progress("verifying", total_bytes(archive), output.progress);
    for (const auto& tensor : archive.tensors()) {
      uint32_t sum = 0;
      archive.read(tensor, tensor.pieces[0], int64_t{8} << 20, [&](const std::byte* data, int64_t bytes) {
        sum = crc32c(data, static_cast<size_t>(bytes), sum);
        progress.advance(bytes);
      });
      if (sum != tensor.crc32c) bad.push_back("'" + tensor.name + "' in '" + tensor.pieces[0].file + "'");
    }
  }
  if (output.json) {
    std::cout << Json{{"ok", bad.empty()}, {"tensors", archive.tensors().size()}, {"damaged", bad}}.dump() << std::endl;
  } else if (bad.empty()) {
    std::cout << "all " << archive.tensors().size() << " tensors (" << describe_bytes(total_bytes(archive))
              << ") have their checksums\n";
  } else {
    for (const auto& each : bad) std::cout << "damaged: " << each << '\n';
  }
  return bad.empty() ? 0 : 1;
}

}  // namespace trueshard::checkpoint::tool
