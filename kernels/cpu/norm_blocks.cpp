// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/block_sums.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

double square_sum(const NormCall& call, const float* block) {
  if (call.scale == 1.0) return block_square_sum(block);
  return block_sum(ScaledSquaresOfFloats{{}, block, call.scale});
}
double square_sum(const NormCall& call, const double* block) {
  return block_sum(ScaledSquaresOfDoubles{{}, block, call.scale});
}
double absolute_sum(const float* block) { return block_sum(MagnitudesOfFloats{{}, block}); }
double absolute_sum(const double* block) { return block_sum(MagnitudesOfDoubles{{}, block}); }

// As integers, magnitudes are ordered like the numbers, with NaN above everything.
double largest(const float* block) {
  uint32_t top = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, block[i]) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return top > 0x7f800000 ? __builtin_nan("") : static_cast<double>(__builtin_bit_cast(float, top));
}
double largest(const double* block) {
  uint64_t top = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint64_t bits = __builtin_bit_cast(uint64_t, block[i]) & 0x7fffffffffffffffu;
    top = bits > top ? bits : top;
  }
  return top > 0x7ff0000000000000u ? __builtin_nan("") : __builtin_bit_cast(double, top);
}

template <class Element>
double power_sum(const NormCall& call, const Element* data, int64_t count) {
  double values[kBlock] = {};
  for (int64_t i = 0; i < count; ++i) {
    values[i] = __builtin_pow(__builtin_fabs(static_cast<double>(data[i])) * call.scale, call.power);
  }
  return block_sum(MagnitudesOfDoubles{{}, values});  // the values are not negative
}

template <class Element>
double whole_block(const NormCall& call, const Element* block) {
  switch (call.kind) {
    case NormKind::kSquare:
      return square_sum(call, block);
    case NormKind::kAbsolute:
      return absolute_sum(block);
    case NormKind::kMaximum:
      return largest(block);
    case NormKind::kPower:
      break;
  }
  return power_sum(call, block, kBlock);
}

template <class Element>
void norm_blocks_of(const NormCall& call) {
  const auto* data = static_cast<const Element*>(call.data);
  int64_t begin = 0;
  double* value = call.block_values;
  for (; begin + kBlock <= call.count; begin += kBlock) *value++ = whole_block(call, data + begin);
  if (begin == call.count) return;
  const int64_t count = call.count - begin;
  if (call.kind == NormKind::kPower) {
    *value = power_sum(call, data + begin, count);
    return;
  }
  Element block[kBlock] = {};
  for (int64_t i = 0; i < count; ++i) block[i] = data[begin + i];
  *value = whole_block(call, block);
}

}  // namespace

void norm_blocks(const NormCall& call) {
  if (call.dtype == DType::kFloat64) {
    norm_blocks_of<double>(call);
  } else {
    norm_blocks_of<float>(call);
  }
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
