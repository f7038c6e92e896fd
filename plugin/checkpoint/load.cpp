// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/load.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <optional>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/matching.h"

namespace trueshard::checkpoint {

namespace {

constexpr const char* kLoadCheckpoint = "load_checkpoint";

struct OpenFile {
  File file;
  Header header;
  std::map<std::string_view, const TensorInfo*> index;
};

class Reader {
 public:
  Reader(const Folder& folder, int64_t chunk) : folder_(folder), chunk_(chunk) {}

  // Reads the part and returns its share of the tensor's sum, or throws when the whole was read and is not right.
  uint32_t read(const Reading& reading) {
    const auto& open = file(reading.part.file);
    const auto* info = open.index.at(reading.part.name);
    const TensorPlace place{open.header.data_offset + info->begin, info->bytes()};
    const uint32_t share = read_part(reading.part, open.file, place, chunk_);
    if (reading.whole) require_sum(reading, share);
    return share;
  }

  static void require_sum(const Reading& reading, uint32_t shares) {
    const auto& stored = *reading.stored;
    const int64_t bytes = elements_of(stored.shape, itemsize(stored.dtype)).value_or(0) * itemsize(stored.dtype);
    if (crc32c_of_shares(shares, static_cast<uint64_t>(bytes)) != stored.crc32c)
      throw FormatError("the bytes of '" + stored.name + "' in '" + reading.part.file +
                        "' have another checksum than the manifest says; the file is damaged");
  }

 private:
  const OpenFile& file(const std::string& name) {
    auto found = files_.find(name);
    if (found == files_.end()) {
      File file = folder_.open_file(name);
      Header header = read_header(file);
      found = files_.emplace(name, OpenFile{std::move(file), std::move(header), {}}).first;
      for (const auto& tensor : found->second.header.tensors) found->second.index[tensor.name] = &tensor;
    }
    return found->second;
  }

  const Folder& folder_;
  int64_t chunk_;
  std::map<std::string, OpenFile> files_;
};

std::string bytes_of(const std::vector<uint32_t>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint32_t));
}

// Sharded tensors were read in parts by all ranks: their shares together must give the stored sum.
void verify_shares(const std::vector<Reading>& readings, const std::vector<std::string>& shares) {
  for (size_t i = 0; i < readings.size(); ++i) {
    if (readings[i].whole) continue;
    uint32_t sum = 0;
    for (const auto& each : shares) {
      uint32_t share = 0;
      std::memcpy(&share, each.data() + i * sizeof share, sizeof share);
      sum ^= share;
    }
    Reader::require_sum(readings[i], sum);
  }
}

}  // namespace

void load(const LoadRequest& request) {
  for (const auto& target : request.targets) {
    if (target.session) target.session->prepare_checkpoint(kLoadCheckpoint);
  }
  Conversation first(request.transport, kLoadCheckpoint, 4096);
  std::optional<Folder> folder;
  Manifest manifest;
  std::string error = error_of([&] {
    folder.emplace(Folder::open(request.folder));
    manifest = read_manifest(*folder);
  });
  first.require_same(error, manifest.id, "the checkpoint's id");

  std::optional<Matching> matching;
  error = error_of([&] {
    matching.emplace(request, manifest, first.rank(), first.size());
    if (!matching->problems().empty()) throw FormatError(matching->problems());
  });
  first.require_same(error, std::to_string(matching ? matching->readings().size() : 0), "the number of tensors");

  Conversation second(request.transport, kLoadCheckpoint, sizeof(uint32_t) * matching->readings().size());
  std::vector<uint32_t> shares;
  error = error_of([&] {
    Reader reader(*folder, request.chunk_bytes);
    for (const auto& reading : matching->readings()) shares.push_back(reader.read(reading));
  });
  const auto all = second.exchange(error, bytes_of(shares));
  second.exchange(error_of([&] { verify_shares(matching->readings(), all); }));

  matching->apply();
  for (const auto& target : request.targets) {
    if (target.session) target.session->publish_masters();
  }
}

}  // namespace trueshard::checkpoint
