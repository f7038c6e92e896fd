// SPDX-License-Identifier: BSD-3-Clause
// Role: what the optimizers share: libtorch's add with a factor, gradient factors, the compute copy, short rows.
// Invariants: one rounding per written operation; kFused is libtorch's vector kernels, which fuse multiply and add.
// Shapes: rows of kRow elements, the last may be shorter. Threads: pure. Errors: none.
#pragma once
#include "kernels/cpu/rows.h"
#include "kernels/optimizer_scalars.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {

template <bool kFused>
TRUESHARD_INLINE Floats add_scaled(Floats base, Floats other, Floats factor) {
  if constexpr (kFused) {
    return fused_multiply_add(other, factor, base);
  } else {
    return add(base, multiply(factor, other));
  }
}

// `part` is the constant kRow except for the last row.
template <class Type = Float32>
TRUESHARD_INLINE Floats load_row(const typename Type::Element* data, int64_t part) {
  return part == kRow ? Type::load(data) : load_part<Type>(data, part);
}
template <class Type = Float32>
TRUESHARD_INLINE void store_row(typename Type::Element* data, int64_t part, Floats x) {
  if (part == kRow) {
    Type::store(data, x);
  } else {
    store_part<Type>(data, part, x);
  }
}

TRUESHARD_INLINE Floats load_gradient(const float* data, int64_t part, const GradientFactors& factors) {
  Floats gradient = load_row(data, part);
  if (factors.unscale) gradient = multiply(gradient, splat(factors.inverse_scale));
  if (factors.clip) gradient = multiply(gradient, splat(factors.clip_coefficient));
  return gradient;
}

TRUESHARD_INLINE void write_copy(const ParameterCopy& copy, int64_t index, int64_t part, Floats parameter) {
  if (copy.data == nullptr) return;
  switch (copy.dtype) {
    case DType::kBFloat16:
      return store_row<BFloat16>(static_cast<uint16_t*>(copy.data) + index, part, parameter);
    case DType::kFloat16:
      return store_row<Float16>(static_cast<uint16_t*>(copy.data) + index, part, parameter);
    case DType::kFloat32:
    case DType::kFloat64:
      return store_row(static_cast<float*>(copy.data) + index, part, parameter);
  }
}

// function(first element, length) for every row of [begin, end).
template <class Function>
TRUESHARD_INLINE void each_row(int64_t begin, int64_t end, Function function) {
  int64_t i = begin;
  for (; i + kRow <= end; i += kRow) function(i, int64_t{kRow});
  if (i < end) function(i, end - i);
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
