// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/save.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/inventory.h"
#include "plugin/checkpoint/staged_folder.h"
#include "plugin/comm/torch_version.h"
#include "plugin/engine/agreement.h"
#include "plugin/engine/backward_tracker.h"

namespace trueshard::checkpoint {

namespace {

constexpr const char* kSaveCheckpoint = "save_checkpoint";

std::string random_id() {
  std::random_device device;
  std::string id;
  for (int i = 0; i < 4; ++i) {
    for (uint32_t value = device(), digit = 0; digit < 4; ++digit, value >>= 4) id += "0123456789abcdef"[value & 15];
  }
  return id;
}

// Fresh memory costs a fault for each page on first touch, which would be most of a snapshot's time.
void prefer_large_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint
}

// What must be the same on all ranks, in lines of text.
std::vector<std::string> lines_of(const std::string& destination, const Inventory& inventory) {
  std::vector<std::string> lines{"destination '" + destination + "'"};
  for (const auto& entry : inventory.entries) lines.push_back(describe(entry));
  for (const auto& [name, file] : inventory.files) {
    for (const auto& tensor : file.tensors)
      lines.push_back(name + ": " + tensor.name + " " + name_of(tensor.dtype) + " " + describe_shape(tensor.shape));
  }
  return lines;
}

void agree(const SaveRequest& request, const std::string& error, const Inventory& inventory, const std::string& me) {
  if (!request.transport || request.transport->size() == 1) {
    TORCH_CHECK(error.empty(), me, ": ", error);
    return;
  }
  const auto number = engine::BackwardTracker::of(request.transport)->next_number();
  engine::require_agreement(request.transport, "save agreement " + std::to_string(number),
                            {error, lines_of(request.destination, inventory)}, kSaveCheckpoint,
                            "give the same folder and the same state on all ranks");
}

}  // namespace

SaveJob::SaveJob(const SaveRequest& request) : destination_(request.destination), chunk_bytes_(request.chunk_bytes) {
  const int rank = request.transport ? request.transport->rank() : 0;
  const int world = request.transport ? request.transport->size() : 1;
  for (const auto& target : request.targets) {
    if (target.session) target.session->prepare_checkpoint(kSaveCheckpoint);
  }
  Inventory inventory;
  const auto error = error_of([&] {
    inventory = take_inventory(request.targets, rank, world);
    for (auto& [name, file] : inventory.files) {
      files_.push_back(plan_file(file.tensors, file.metadata));
      StoredFile stored{
          name, files_.back().header.file_bytes, crc32c(files_.back().bytes.data(), files_.back().bytes.size()), {}};
      for (const auto& tensor : files_.back().header.tensors)
        stored.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, 0, file.other_names[tensor.name]});
      manifest_.files.push_back(std::move(stored));
    }
  });
  agree(request, error, inventory,
        "trueshard[rank " + std::to_string(rank) + "/" + std::to_string(world) + "] " + kSaveCheckpoint);
  parts_ = std::move(inventory.parts);
  manifest_.entries = std::move(inventory.entries);
  manifest_.library_version = TRUESHARD_VERSION;
  manifest_.torch_version = comm::to_string(comm::compiled_torch());
  manifest_.world_size = world;
  manifest_.ranks_file = kRanksFile;
  size_t tensors = 0;
  for (const auto& file : files_) tensors += file.header.tensors.size();
  conversation_ = std::make_unique<Conversation>(request.transport, kSaveCheckpoint, 64 + sizeof(uint32_t) * tensors);
  id_ = conversation_->exchange({}, rank == 0 ? random_id() : "")[0];
  manifest_.id = id_;
}

int64_t SaveJob::bytes() const {
  int64_t bytes = 0;
  for (const auto& part : parts_) bytes += part.view ? part.view->owned.size() * part.item : part.end - part.begin;
  return bytes;
}

void SaveJob::take_snapshot() {
  constexpr int64_t kAlignment = 64;
  const auto aligned = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  int64_t total = 0;
  const auto held = [](const Part& part) {
    return part.view ? part.view->owned.size() * part.item : part.end - part.begin;
  };
  for (const auto& part : parts_) total += aligned(held(part));
  const auto memory = at::empty({total}, at::kByte);
  prefer_large_pages(memory.data_ptr(), total);
  auto* at = static_cast<std::byte*>(memory.data_ptr());
  for (auto& part : parts_) {
    std::memcpy(at, part.data, static_cast<size_t>(held(part)));
    part.data = at;
    part.keep = memory;
    at += aligned(held(part));
  }
}

void SaveJob::write_headers(const StagedFolder& staged) const {
  for (size_t f = 0; f < files_.size(); ++f) {
    File file = staged.folder().create(manifest_.files[f].name);
    file.reserve(files_[f].header.file_bytes);
    file.write(files_[f].bytes.data(), static_cast<int64_t>(files_[f].bytes.size()), 0);
  }
}

std::string SaveJob::write_parts(const Folder& folder) const {
  std::vector<uint32_t> shares;
  const size_t count = files_.size();
  std::vector<std::vector<uint32_t>> by_file(count);
  for (size_t k = 0; k < count; ++k) {
    // Ranks begin with different files: a file system lets one writer at a time into a file.
    const size_t f = (k + static_cast<size_t>(rank())) % count;
    const auto& header = files_[f].header;
    std::map<std::string_view, size_t> index;
    for (size_t t = 0; t < header.tensors.size(); ++t) index[header.tensors[t].name] = t;
    by_file[f].assign(header.tensors.size(), 0);
    File file = folder.open_for_writing(manifest_.files[f].name);
    for (const auto& part : parts_) {
      if (part.file != manifest_.files[f].name) continue;
      const size_t t = index.at(part.name);
      const auto& tensor = header.tensors[t];
      by_file[f][t] = write_part(part, file, {header.data_offset + tensor.begin, tensor.bytes()}, chunk_bytes_);
    }
    file.sync();
    if (file.size() != header.file_bytes)
      throw FormatError("'" + file.path() + "' has " + std::to_string(file.size()) + " bytes after writing " +
                        std::to_string(header.file_bytes) + "; something else writes there");
  }
  for (const auto& each : by_file) shares.insert(shares.end(), each.begin(), each.end());
  return std::string(reinterpret_cast<const char*>(shares.data()), shares.size() * sizeof(uint32_t));
}

void SaveJob::finish(StagedFolder& staged, const std::vector<std::string>& shares) {
  size_t at = 0;
  for (auto& file : manifest_.files) {
    for (auto& tensor : file.tensors) {
      uint32_t sum = 0;
      for (const auto& each : shares) {
        uint32_t share = 0;
        std::memcpy(&share, each.data() + at, sizeof share);
        sum ^= share;
      }
      at += sizeof(uint32_t);
      const auto elements = elements_of(tensor.shape, itemsize(tensor.dtype)).value_or(0);
      tensor.crc32c = crc32c_of_shares(sum, static_cast<uint64_t>(elements * itemsize(tensor.dtype)));
    }
  }
  const std::string text = to_text(manifest_);
  File file = staged.folder().create(kManifestName);
  file.write(text.data(), static_cast<int64_t>(text.size()), 0);
  file.sync();
  staged.commit();
}

void SaveJob::write() {
  std::optional<StagedFolder> staged;
  try {
    conversation_->exchange(error_of([&] {
      if (rank() != 0) return;
      staged.emplace(StagedFolder::prepare(destination_, id_));
      write_headers(*staged);
    }));
    std::string mine;
    const auto error = error_of([&] {
      mine = rank() == 0 ? write_parts(staged->folder()) : write_parts(StagedFolder::open(destination_, id_));
    });
    const auto shares = conversation_->exchange(error, mine);
    conversation_->exchange(error_of([&] {
      if (rank() == 0) finish(*staged, shares);
    }));
  } catch (...) {
    if (staged) staged->discard();
    throw;
  }
}

}  // namespace trueshard::checkpoint
