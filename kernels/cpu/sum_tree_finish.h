// SPDX-License-Identifier: BSD-3-Clause
// Role: the last steps of a reduction on one block of values: division, base, checks, squares, one rounding, store.
// Invariants: the order of roundings is SumEpilogue's. The base is read before the output of the same row is written.
// Shapes: blocks of at most kBlock values in an array of kBlock; values beyond count are zero up to a whole row.
// Threads: pure. Errors: none.
#pragma once
#include "kernels/cpu/block_sums.h"
#include "kernels/cpu/round_to_odd.h"
#include "kernels/cpu/rows.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {

// x / divisor, as x * factor where that has the same bits: a power of two whose reciprocal is a normal number.
template <class Number>
struct Division {
  bool true_division = false;
  Number factor = 1;
  Number divisor = 1;
};

TRUESHARD_INLINE Division<float> float_division(const SumEpilogue& epilogue) {
  Division<float> division;
  if (!epilogue.divide) return division;
  division.divisor = static_cast<float>(epilogue.divisor);
  const uint32_t bits = __builtin_bit_cast(uint32_t, division.divisor);
  const uint32_t exponent = (bits >> 23) & 0xff;
  const bool power_of_two = (bits & 0x7fffff) == 0 && exponent >= 1 && exponent <= 253;
  if (power_of_two) {
    division.factor = 1.0f / division.divisor;
  } else {
    division.true_division = true;
  }
  return division;
}

TRUESHARD_INLINE Division<double> double_division(const SumEpilogue& epilogue) {
  Division<double> division;
  division.true_division = epilogue.divide;
  division.divisor = epilogue.divisor;
  return division;
}

TRUESHARD_INLINE Floats apply(const Division<float>& division, Floats x) {
  return division.true_division ? divide(x, splat(division.divisor)) : multiply(x, splat(division.factor));
}

// What the block loop does besides storing outputs[0].
template <class Number>
struct Finish {
  Division<Number> division;
  const Number* base;
  uint8_t* nonfinite;
  double* square_sums;
  void* output;
  DType output_dtype;
};

template <class Number>
TRUESHARD_INLINE void zero_fill(Number* block, int64_t count) {
  for (int64_t i = (count + kRow - 1) / kRow * kRow; i < kBlock; ++i) block[i] = 0;
}

// Divides one row, adds the base, stores it rounded, and gives back what was rounded.
template <class Out>
TRUESHARD_INLINE Floats finish_row(const Finish<float>& finish, Floats x, int64_t index, int64_t part) {
  x = apply(finish.division, x);
  if (finish.base != nullptr) {
    const float* base = finish.base + index;
    x = add(part == kRow ? load_f32(base) : load_part<Float32>(base, part), x);
  }
  auto* output = static_cast<typename Out::Element*>(finish.output) + index;
  if (part == kRow) {
    Out::store(output, x);
  } else {
    store_part<Out>(output, part, x);
  }
  return x;
}

template <class Out>
TRUESHARD_INLINE void finish_rows(const Finish<float>& finish, float* block, int64_t begin, int64_t count) {
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) {
    store_f32(block + i, finish_row<Out>(finish, load_f32(block + i), begin + i, kRow));
  }
  if (i < count) store_f32(block + i, finish_row<Out>(finish, load_f32(block + i), begin + i, count - i));
}

// fp32 squares cannot overflow in fp64, so a block sum is finite exactly when all its values are.
TRUESHARD_INLINE void store_square_sum(const Finish<float>& finish, int64_t begin, double sum) {
  finish.square_sums[begin / kBlock] = sum;
  if (finish.nonfinite != nullptr && !(sum <= __DBL_MAX__)) *finish.nonfinite = 1;
}

TRUESHARD_INLINE void check_block(const Finish<float>& finish, float* block, int64_t begin, int64_t count) {
  if (finish.square_sums != nullptr) {
    if (count < kBlock) zero_fill(block, count);
    store_square_sum(finish, begin, block_square_sum(block));
  } else if (finish.nonfinite != nullptr) {
    FiniteCheck check;
    for (int64_t i = 0; i < count; i += kRow) check.see(load_f32(block + i));
    if (check.failed()) *finish.nonfinite = 1;
  }
}

inline void finish_block(const Finish<float>& finish, float* block, int64_t begin, int64_t count) {
  switch (finish.output_dtype) {
    case DType::kBFloat16:
      finish_rows<BFloat16>(finish, block, begin, count);
      break;
    case DType::kFloat16:
      finish_rows<Float16>(finish, block, begin, count);
      break;
    case DType::kFloat32:
    case DType::kFloat64:
      finish_rows<Float32>(finish, block, begin, count);
      break;
  }
  check_block(finish, block, begin, count);
}

template <class Out>
inline void store_rounded(typename Out::Element* output, const double* block, int64_t count) {
  for (int64_t i = 0; i < count; i += kRow) {
    alignas(64) float row[kRow] = {};
    const int64_t part = count - i < kRow ? count - i : kRow;
    for (int64_t k = 0; k < part; ++k) row[k] = round_to_odd(block[i + k]);
    if (part == kRow) {
      Out::store(output + i, load_f32(row));
    } else {
      store_part<Out>(output + i, part, load_f32(row));
    }
  }
}

inline void finish_block(const Finish<double>& finish, double* block, int64_t begin, int64_t count) {
  uint64_t largest = 0;  // magnitude bits: inf and NaN are the largest integers
  for (int64_t i = 0; i < count; ++i) {
    double x = block[i];
    if (finish.division.true_division) x = x / finish.division.divisor;
    if (finish.base != nullptr) x = finish.base[begin + i] + x;
    const uint64_t bits = __builtin_bit_cast(uint64_t, x) & 0x7fffffffffffffffu;
    largest = bits > largest ? bits : largest;
    block[i] = x;
  }
  if (finish.nonfinite != nullptr && largest >= 0x7ff0000000000000u) *finish.nonfinite = 1;
  switch (finish.output_dtype) {
    case DType::kBFloat16:
      store_rounded<BFloat16>(static_cast<uint16_t*>(finish.output) + begin, block, count);
      break;
    case DType::kFloat16:
      store_rounded<Float16>(static_cast<uint16_t*>(finish.output) + begin, block, count);
      break;
    case DType::kFloat32:
    case DType::kFloat64:
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(finish.output)[begin + i] = block[i];
      break;
  }
  if (finish.square_sums == nullptr) return;
  for (int64_t i = count; i < kBlock; ++i) block[i] = 0;
  finish.square_sums[begin / kBlock] = block_square_sum(block);
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
