// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/part.h"

#include <algorithm>
#include <cstring>

#include "plugin/checkpoint/crc32c.h"

namespace trueshard::checkpoint {

namespace {

// Walks over elements in row-major order and knows where each lies in memory order.
class Walk {
 public:
  explicit Walk(const ShardView& view) : view_(view), index_(view.sizes.size(), 0) {}
  int64_t in_memory() const { return memory_; }
  void advance() {
    for (size_t d = index_.size(); d-- > 0;) {
      memory_ += view_.strides[d];
      if (++index_[d] < view_.sizes[d]) return;
      memory_ -= view_.strides[d] * view_.sizes[d];
      index_[d] = 0;
    }
  }

 private:
  const ShardView& view_;
  std::vector<int64_t> index_;
  int64_t memory_ = 0;
};

// Runs of elements that lie side by side in the file and belong to this rank, written a chunk at a time. The sum covers
// the whole tensor with zeros in the others' places, which adds nothing to the whole's.
uint32_t write_strided(const Part& part, File& file, const TensorPlace& place, int64_t chunk) {
  const auto& view = *part.view;
  const int64_t item = part.item, per_chunk = std::max<int64_t>(chunk / item, 1), count = place.bytes / item;
  std::vector<std::byte> staging(static_cast<size_t>(std::min(per_chunk, count) * item));
  Walk walk(view);
  uint32_t crc = 0;
  for (int64_t first = 0; first < count; first += per_chunk) {
    const int64_t elements = std::min(per_chunk, count - first);
    std::fill(staging.begin(), staging.end(), std::byte{0});
    int64_t run = 0;  // elements before the current one that are ours
    const auto flush = [&](int64_t end) {
      if (run > 0)
        file.write(staging.data() + (end - run) * item, run * item, place.offset + (first + end - run) * item);
      run = 0;
    };
    for (int64_t i = 0; i < elements; ++i, walk.advance()) {
      const int64_t at = walk.in_memory();
      if (at < view.piece.begin || at >= view.piece.end) {
        flush(i);
        continue;
      }
      std::memcpy(staging.data() + i * item, part.data + (at - view.owned.begin) * item, static_cast<size_t>(item));
      ++run;
    }
    flush(elements);
    crc = crc32c(staging.data(), static_cast<size_t>(elements * item), crc);
  }
  // The linear part of a sum over zeros in others' places is that of our elements alone.
  return crc32c_share(crc, static_cast<uint64_t>(place.bytes), 0);
}

uint32_t read_strided(const Part& part, const File& file, const TensorPlace& place, int64_t chunk) {
  const auto& view = *part.view;
  const int64_t item = part.item, per_chunk = std::max<int64_t>(chunk / item, 1), count = place.bytes / item;
  std::vector<std::byte> staging(static_cast<size_t>(std::min(per_chunk, count) * item));
  Walk walk(view);
  uint32_t crc = 0;
  for (int64_t first = 0; first < count; first += per_chunk) {
    const int64_t elements = std::min(per_chunk, count - first);
    file.read(staging.data(), elements * item, place.offset + first * item);
    crc = crc32c(staging.data(), static_cast<size_t>(elements * item), crc);
    for (int64_t i = 0; i < elements; ++i, walk.advance()) {
      const int64_t at = walk.in_memory();
      if (at >= view.owned.begin && at < view.owned.end)
        std::memcpy(part.data + (at - view.owned.begin) * item, staging.data() + i * item, static_cast<size_t>(item));
    }
  }
  return crc32c_share(crc, static_cast<uint64_t>(place.bytes), 0);
}

template <typename Move>
uint32_t pass_by(const Part& part, const TensorPlace& place, int64_t chunk, const Move& move) {
  uint32_t crc = 0;
  for (int64_t at = part.begin; at < part.end; at += chunk) {
    const int64_t bytes = std::min(chunk, part.end - at);
    crc = move(part.data + (at - part.begin), bytes, place.offset + at, crc);
  }
  return crc32c_share(crc, static_cast<uint64_t>(part.end - part.begin), static_cast<uint64_t>(place.bytes - part.end));
}

}  // namespace

uint32_t write_part(const Part& part, File& file, const TensorPlace& place, int64_t chunk) {
  if (part.view) return write_strided(part, file, place, chunk);
  return pass_by(part, place, chunk, [&](const std::byte* data, int64_t bytes, int64_t offset, uint32_t crc) {
    crc = crc32c(data, static_cast<size_t>(bytes), crc);
    file.write(data, bytes, offset);
    return crc;
  });
}

uint32_t read_part(const Part& part, const File& file, const TensorPlace& place, int64_t chunk) {
  if (part.view) return read_strided(part, file, place, chunk);
  return pass_by(part, place, chunk, [&](std::byte* data, int64_t bytes, int64_t offset, uint32_t crc) {
    file.read(data, bytes, offset);
    return crc32c(data, static_cast<size_t>(bytes), crc);
  });
}

}  // namespace trueshard::checkpoint
