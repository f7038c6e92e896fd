// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <unordered_set>

#include "kernels/kernels.h"
#include "plugin/checkpoint/archive.h"
#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/strict_json.h"
#include "plugin/checkpoint/tool/commands.h"

namespace trueshard::checkpoint::tool {

namespace fs = std::filesystem;

namespace {

std::optional<kernels::DType> kernel_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return kernels::DType::kFloat32;
    case Dtype::kF64:
      return kernels::DType::kFloat64;
    case Dtype::kBF16:
      return kernels::DType::kBFloat16;
    case Dtype::kF16:
      return kernels::DType::kFloat16;
    default:
      return std::nullopt;
  }
}

const StoredEntry& entry_with_weights(const Manifest& manifest, const std::string& key) {
  const StoredEntry* found = nullptr;
  std::string keys;
  for (const auto& entry : manifest.entries) {
    if (entry.kind != EntryKind::kOptimizer && entry.kind != EntryKind::kModule) continue;
    keys += (keys.empty() ? "'" : ", '") + entry.key + "'";
    if (!key.empty() && entry.key != key) continue;
    if (found) throw FormatError("the checkpoint has several modules (" + keys + ", ...); choose one with --entry");
    found = &entry;
  }
  if (!found) throw FormatError("the checkpoint has no module" + (key.empty() ? "" : " '" + key + "'; it has " + keys));
  return *found;
}

struct Job {  // one tensor on its way
  const ArchivedTensor* from;
  Dtype dtype;
};

std::vector<Job> jobs_of(const Archive& archive, const StoredEntry& entry, Dtype wanted) {
  const std::unordered_set<std::string> buffers(entry.buffers.begin(), entry.buffers.end());
  std::vector<Job> jobs;
  for (const auto& tensor : archive.tensors()) {
    if (tensor.owner != entry.file) continue;
    const bool cast = kernel_dtype(tensor.dtype) && buffers.count(tensor.name) == 0;
    jobs.push_back({&tensor, cast ? wanted : tensor.dtype});
  }
  return jobs;
}

int64_t bytes_of(const Job& job) { return job.from->bytes() / itemsize(job.from->dtype) * itemsize(job.dtype); }

// Cuts the list where the next tensor would make a file too large.
std::vector<std::vector<Job>> split(const std::vector<Job>& jobs, int64_t most) {
  std::vector<std::vector<Job>> files(1);
  int64_t bytes = 0;
  for (const auto& job : jobs) {
    if (!files.back().empty() && bytes + bytes_of(job) > most) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(job);
    bytes += bytes_of(job);
  }
  return files;
}

void write_file(Archive& archive, const std::vector<Job>& jobs, File& file, Progress& progress) {
  std::vector<TensorInfo> infos;
  std::map<std::string, const Job*> by_name;
  for (const auto& job : jobs) {
    infos.push_back({job.from->name, job.dtype, job.from->shape});
    by_name[job.from->name] = &job;
  }
  const auto planned = plan_file(std::move(infos), {{"format", "pt"}});
  file.reserve(planned.header.file_bytes);
  file.write(planned.bytes.data(), static_cast<int64_t>(planned.bytes.size()), 0);
  std::vector<std::byte> converted;
  for (const auto& info : planned.header.tensors) {
    const Job& job = *by_name.at(info.name);
    const auto in = kernel_dtype(job.from->dtype);
    int64_t at = planned.header.data_offset + info.begin;
    uint32_t sum = 0;
    archive.read(*job.from, job.from->pieces[0], int64_t{8} << 20, [&](const std::byte* data, int64_t bytes) {
      sum = crc32c(data, static_cast<size_t>(bytes), sum);
      progress.advance(bytes);
      int64_t count = bytes;
      if (job.dtype != job.from->dtype) {
        const int64_t elements = bytes / itemsize(job.from->dtype);
        count = elements * itemsize(job.dtype);
        converted.resize(static_cast<size_t>(count));
        kernels::kernels().cast(data, *in, converted.data(), *kernel_dtype(job.dtype), elements);
        data = converted.data();
      }
      file.write(data, count, at);
      at += count;
    });
    if (job.from->crc32c && sum != *job.from->crc32c)
      throw FormatError("'" + info.name + "' in '" + job.from->pieces[0].file + "' is damaged: its checksum differs");
  }
  file.sync();
}

// Written under another name and renamed when complete.
class Writer {
 public:
  Writer(const ExportRequest& request)
      : folder_((fs::create_directories(request.folder), request.folder)), force_(request.force) {}
  template <typename Fill>
  void write(const std::string& name, const Fill& fill) {
    const fs::path path = folder_ / name, part = folder_ / ("." + name + ".part");
    if (!force_ && fs::exists(path)) throw FormatError("'" + path.string() + "' exists; --force writes over it");
    fs::remove(part);
    try {
      File file = Folder::open(folder_.string()).create(part.filename().string());
      fill(file);
      fs::rename(part, path);
    } catch (...) {
      std::error_code ignored;
      fs::remove(part, ignored);
      throw;
    }
    names_.push_back(name);
  }
  const std::vector<std::string>& names() const { return names_; }

 private:
  fs::path folder_;
  bool force_;
  std::vector<std::string> names_;
};

std::string numbered(size_t i, size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, count);
  return name;
}

}  // namespace

int export_weights(const ExportRequest& request, const Output& output) {
  Archive archive(request.path);
  if (!archive.manifest())
    throw FormatError("'" + request.path + "' is not a trueshard checkpoint; it is plain already");
  const auto& entry = entry_with_weights(*archive.manifest(), request.entry);
  const Dtype wanted = request.dtype == "bf16" ? Dtype::kBF16 : request.dtype == "fp16" ? Dtype::kF16 : Dtype::kF32;
  const auto jobs = jobs_of(archive, entry, wanted);
  int64_t in_bytes = 0, out_bytes = 0;
  for (const auto& job : jobs) in_bytes += job.from->bytes(), out_bytes += bytes_of(job);
  const auto files = split(jobs, request.most_file_bytes);
  Writer writer(request);
  {
    Progress progress("exporting", in_bytes, output.progress);
    Json map = Json::object();
    for (size_t i = 0; i < files.size(); ++i) {
      const std::string name = files.size() == 1 ? "model.safetensors" : numbered(i, files.size());
      writer.write(name, [&](File& file) { write_file(archive, files[i], file, progress); });
      for (const auto& job : files[i]) map[job.from->name] = name;
    }
    if (files.size() > 1) {
      const std::string index = Json{{"metadata", {{"total_size", out_bytes}}}, {"weight_map", map}}.dump(2) + "\n";
      writer.write("model.safetensors.index.json", [&](File& file) {
        file.write(index.data(), static_cast<int64_t>(index.size()), 0);
        file.sync();
      });
    }
  }
  if (output.json) {
    std::cout << Json{{"ok", true}, {"tensors", jobs.size()}, {"bytes", out_bytes}, {"files", writer.names()}}.dump()
              << std::endl;
  } else {
    std::cout << "wrote " << jobs.size() << " tensors, " << describe_bytes(out_bytes) << ", to " << request.folder
              << '/' << writer.names()[0] << (files.size() > 1 ? " and the files after it" : "") << '\n';
  }
  return 0;
}

}  // namespace trueshard::checkpoint::tool
