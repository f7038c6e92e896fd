// SPDX-License-Identifier: BSD-3-Clause
// Role: fp64 to fp32 such that a second rounding to 16 bits gives the single rounding of the fp64 number.
// Invariants: truncation with the last bit set when inexact ("round to odd"): fp32 keeps more than two bits beyond both
//             16-bit formats at every exponent, so that no tie is made or lost. NaN stays NaN.
// Shapes: one element. Threads: pure. Errors: none.
#pragma once
#include "kernels/cpu/isa.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {

TRUESHARD_INLINE float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  uint32_t bits = __builtin_bit_cast(uint32_t, nearest);
  const double back = nearest;
  const bool inexact = back != value && value == value;
  const bool too_large = __builtin_fabs(back) > __builtin_fabs(value);
  bits -= inexact && too_large ? 1u : 0u;
  bits |= inexact ? 1u : 0u;
  return __builtin_bit_cast(float, bits);
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
