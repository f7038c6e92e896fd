// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/dtype.h"

namespace trueshard::checkpoint {

namespace {

struct Row {
  Dtype dtype;
  const char* name;
  int64_t itemsize;
};
constexpr Row kTable[] = {
    {Dtype::kBool, "BOOL", 1},      {Dtype::kU8, "U8", 1},   {Dtype::kI8, "I8", 1},   {Dtype::kF8E4M3, "F8_E4M3", 1},
    {Dtype::kF8E5M2, "F8_E5M2", 1}, {Dtype::kI16, "I16", 2}, {Dtype::kU16, "U16", 2}, {Dtype::kF16, "F16", 2},
    {Dtype::kBF16, "BF16", 2},      {Dtype::kI32, "I32", 4}, {Dtype::kU32, "U32", 4}, {Dtype::kF32, "F32", 4},
    {Dtype::kI64, "I64", 8},        {Dtype::kU64, "U64", 8}, {Dtype::kF64, "F64", 8}, {Dtype::kC64, "C64", 8},
};

}  // namespace

const char* name_of(Dtype dtype) { return kTable[static_cast<size_t>(dtype)].name; }
int64_t itemsize(Dtype dtype) { return kTable[static_cast<size_t>(dtype)].itemsize; }

std::optional<Dtype> dtype_named(std::string_view name) {
  for (const Row& row : kTable) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<int64_t> elements_of(const std::vector<int64_t>& shape, int64_t item) {
  int64_t bytes = item;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    empty |= extent == 0;
    // An empty tensor may have huge other extents; they count nothing.
    if (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return empty ? 0 : bytes / item;
}

std::string describe_shape(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace trueshard::checkpoint
