// SPDX-License-Identifier: BSD-3-Clause
// Role: number formats by definition: every conversion goes through double arithmetic that can be checked on paper.
// Invariants: widening is exact; narrowing is one rounding to nearest even; NaN becomes a quiet NaN.
// Shapes: one element. Threads: pure. Errors: none. Expects the default MXCSR.
#pragma once
#include <cmath>
#include <cstring>

#include "kernels/entry_points.h"

TRUESHARD_KERNEL_ENTRY_POINTS(reference)

namespace trueshard::kernels::reference {

template <typename To, typename From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &value, sizeof(out));
  return out;
}

// A binary format of 16 bits: value = mantissa * 2^(max(exponent, 1) - bias - mantissa_bits), with the
// implicit bit from exponent 1 on.
struct HalfFormat {
  int mantissa_bits;
  int bias;
  int exponent_mask() const { return (1 << (15 - mantissa_bits)) - 1; }
};
constexpr HalfFormat kBFloat16Format{7, 127};
constexpr HalfFormat kFloat16Format{10, 15};

inline double widen(uint16_t bits, HalfFormat format) {
  const uint64_t sign = static_cast<uint64_t>(bits >> 15) << 63;
  const int exponent = (bits >> format.mantissa_bits) & format.exponent_mask();
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  if (exponent == format.exponent_mask()) {
    const uint64_t payload = static_cast<uint64_t>(mantissa) << (52 - format.mantissa_bits);
    const uint64_t quiet = mantissa != 0 ? uint64_t{1} << 51 : 0;
    return bits_of<double>(sign | 0x7ff0000000000000u | payload | quiet);
  }
  const int whole = exponent == 0 ? mantissa : mantissa | (1 << format.mantissa_bits);
  const double magnitude = std::ldexp(whole, std::max(exponent, 1) - format.bias - format.mantissa_bits);
  return sign != 0 ? -magnitude : magnitude;
}

inline uint16_t narrow(double value, HalfFormat format) {
  const uint64_t bits = bits_of<uint64_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 63 << 15);
  const uint16_t infinity = static_cast<uint16_t>(format.exponent_mask() << format.mantissa_bits);
  if (std::isnan(value)) {
    const uint64_t payload = (bits & 0xfffffffffffffu) >> (52 - format.mantissa_bits);
    return static_cast<uint16_t>(sign | infinity | payload | (1u << (format.mantissa_bits - 1)));
  }
  const double magnitude = std::fabs(value);
  if (std::isinf(value) || magnitude == 0) return static_cast<uint16_t>(sign | (magnitude == 0 ? 0 : infinity));
  // The spacing of the format's numbers around the value; below the smallest normal number it stays the same.
  const int lowest = 1 - format.bias;
  const int exponent = std::max(std::ilogb(magnitude), lowest);
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));  // ties to even
  // Adding the exponent field to the rounded mantissa lets a carry move into the exponent, up to infinity.
  const int64_t field = static_cast<int64_t>(exponent - lowest) << format.mantissa_bits;
  const int64_t encoded = field + static_cast<int64_t>(units);
  return static_cast<uint16_t>(sign | (encoded > infinity ? infinity : static_cast<uint16_t>(encoded)));
}

inline double load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat64:
      return static_cast<const double*>(data)[index];
    case DType::kBFloat16:
      return widen(static_cast<const uint16_t*>(data)[index], kBFloat16Format);
    case DType::kFloat16:
      return widen(static_cast<const uint16_t*>(data)[index], kFloat16Format);
  }
  return 0;
}

inline void store(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = value;
      return;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = narrow(value, kBFloat16Format);
      return;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = narrow(value, kFloat16Format);
      return;
  }
}

// The canonical tree over `count` values: halves at the largest power of two below count.
inline double tree_sum(const double* values, int count) {
  if (count == 1) return values[0];
  int split = 1;
  while (split * 2 < count) split *= 2;
  return tree_sum(values, split) + tree_sum(values + split, count - split);
}

// One block: `count` <= kBlock values, the rest +0; the rows of each lane, then the lanes.
inline double block_sum(const double* values, int64_t count) {
  double lanes[16];
  for (int lane = 0; lane < 16; ++lane) {
    double rows[16];
    for (int row = 0; row < 16; ++row) rows[row] = row * 16 + lane < count ? values[row * 16 + lane] : 0.0;
    lanes[lane] = tree_sum(rows, 16);
  }
  return tree_sum(lanes, 16);
}

}  // namespace trueshard::kernels::reference
