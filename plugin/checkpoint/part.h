// SPDX-License-Identifier: BSD-3-Clause
// Role: the elements of one stored tensor that this rank writes or reads, and their way between memory and file.
// Invariants: I1 bytes pass through in pieces of at most `chunk` bytes; row-major parts without a copy. I2 sums cover
// exactly the bytes that were written or read. Shapes: `begin` and `end` are bytes of the tensor in row-major order.
// Threads: one per file range. Errors: FormatError.
#pragma once
#include <cstdint>
#include <memory>

#include "plugin/checkpoint/files.h"
#include "plugin/checkpoint/live_state.h"

namespace trueshard::checkpoint {

struct Part {
  std::string file;
  std::string name;                       // of the tensor
  int64_t begin = 0, end = 0;             // row-major parts; for others the whole tensor
  std::byte* data = nullptr;              // the elements [begin, end), or, in memory order, those of view->owned
  at::Tensor keep;                        // owner of `data`
  std::shared_ptr<const ShardView> view;  // null: row-major
  int64_t item = 1;                       // bytes per element, with a view
};

struct TensorPlace {
  int64_t offset = 0;  // in the file, bytes
  int64_t bytes = 0;
};
// Writes the part and returns its share (crc32c_share) of the tensor's sum.
uint32_t write_part(const Part& part, File& file, const TensorPlace& place, int64_t chunk);
// Reads the part; the returned share is that of its own bytes. With a view the whole tensor passes by and the share is
// the whole tensor's.
uint32_t read_part(const Part& part, const File& file, const TensorPlace& place, int64_t chunk);

}  // namespace trueshard::checkpoint
