// SPDX-License-Identifier: BSD-3-Clause
// Role: the header of a safetensors file, read strictly and written canonically.
// Invariants: I1 tensors cover the data bytes without hole, overlap or rest, in order of offset. I2 names are unique,
// shapes and sizes agree and fit in 63 bits. I3 nothing is allocated on the word of a file: never more than a small
// multiple of the header's own bytes. I4 the same tensors and metadata give the same bytes.
// Shapes: offsets are bytes; `begin` and `end` count from the start of the data, as in the file.
// Threads: pure functions. Errors: FormatError naming the file and the tensor.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "plugin/checkpoint/files.h"

namespace trueshard::checkpoint {

constexpr int64_t kMostHeaderBytes = 100'000'000;  // as the format's own readers have it

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
  int64_t bytes() const { return end - begin; }
  int64_t numel() const { return bytes() / itemsize(dtype); }
};

struct Header {
  std::vector<TensorInfo> tensors;              // in order of offset
  std::map<std::string, std::string> metadata;  // "__metadata__"
  int64_t data_offset = 0;                      // in the file: 8 + length of the header's text
  int64_t file_bytes = 0;
  const TensorInfo* find(std::string_view name) const;  // null: none
};

// `text`: the JSON, without the eight bytes before it.
Header parse_header(std::string_view text, int64_t file_bytes, const std::string& where);
Header read_header(const File& file);
// The same, and the bytes that precede the data.
Header read_header(const File& file, std::string* bytes);

// Lays tensors out (begin and end are set here: larger elements first, then in the given order) and writes the header.
struct PlannedFile {
  Header header;
  std::string bytes;  // what precedes the data
};
PlannedFile plan_file(std::vector<TensorInfo> tensors, std::map<std::string, std::string> metadata);

}  // namespace trueshard::checkpoint
