// SPDX-License-Identifier: BSD-3-Clause
// Role: the element types that a safetensors file can name, and what a file or a manifest is refused with.
// Threads: pure functions. Errors: FormatError.
#pragma once
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trueshard::checkpoint {

// The text says which file, what was found, what was expected and what to do. No torch: the tool throws it too.
struct FormatError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
  kC64,
};
const char* name_of(Dtype dtype);  // "F32"
int64_t itemsize(Dtype dtype);
std::optional<Dtype> dtype_named(std::string_view name);
// Elements of a shape; nothing when an extent is negative or the bytes do not fit in 63 bits.
std::optional<int64_t> elements_of(const std::vector<int64_t>& shape, int64_t item);
std::string describe_shape(const std::vector<int64_t>& shape);  // "[2, 3]"

}  // namespace trueshard::checkpoint
