// SPDX-License-Identifier: BSD-3-Clause
// Role: what the reference optimizers share: libtorch's add with a factor, gradient factors, the compute copy.
// Invariants: each written operation is one rounding to fp32. Shapes: one element. Threads: pure. Errors: none.
#pragma once
#include "kernels/reference/formats.h"

namespace trueshard::kernels::reference {

// libtorch's base.add(other, factor): its vector kernels fuse the multiply and the add, its default ones do not.
inline float add_scaled(float base, float other, float factor, bool fused) {
  if (fused) return std::fma(other, factor, base);
  return base + factor * other;
}

inline float factored(float gradient, const GradientFactors& factors) {
  if (factors.unscale) gradient = gradient * factors.inverse_scale;
  if (factors.clip) gradient = gradient * factors.clip_coefficient;
  return gradient;
}

inline void write_copy(const ParameterCopy& copy, int64_t index, float parameter) {
  if (copy.data != nullptr) store(copy.data, copy.dtype, index, parameter);
}

}  // namespace trueshard::kernels::reference
