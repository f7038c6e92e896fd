// SPDX-License-Identifier: BSD-3-Clause
// Role: rows of 16 numbers as plain loops; defines what vec_avx2.h and vec_avx512.h do with intrinsics.
// Invariants: one IEEE operation per lane and call. Shapes: 16 lanes. Threads: pure. Errors: none.
#pragma once
#include <cstdint>

namespace trueshard::kernels::cpu_scalar {

struct Floats {
  float lane[16];
};
struct Doubles {
  double lane[16];
};

TRUESHARD_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
TRUESHARD_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

TRUESHARD_INLINE float widen_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t exponent = shifted & 0x0f800000;
  uint32_t bits = shifted + ((127 - 15) << 23);
  const uint32_t special = shifted + ((255 - 31) << 23);
  const uint32_t quiet = shifted > 0x0f800000 ? 0x00400000 : 0;
  // A denormal is mantissa * 2^-24: give it the exponent of 2^-14 and take the implicit bit away again, exactly.
  const float denormal = float_of(bits + (1 << 23)) - float_of(113 << 23);
  bits = exponent == 0x0f800000 ? special | quiet : bits;
  bits = exponent == 0 ? bits_of(denormal) : bits;
  return float_of(bits | sign);
}

TRUESHARD_INLINE uint16_t narrow_f16(float value) {
  const uint32_t all = bits_of(value);
  const uint32_t sign = (all >> 16) & 0x8000;
  const uint32_t bits = all & 0x7fffffff;
  // Below 2^-14 the spacing is 2^-24, which is the spacing of fp32 numbers at 0.5: the addition rounds.
  const uint32_t denormal = bits_of(float_of(bits) + 0.5f) - 0x3f000000;
  const uint32_t normal = (bits - ((127 - 15) << 23) + 0x0fff + ((bits >> 13) & 1)) >> 13;
  uint32_t half = bits < 0x38800000 ? denormal : normal;
  half = bits >= 0x477ff000 ? 0x7c00 : half;
  half = bits > 0x7f800000 ? (0x7e00 | ((bits >> 13) & 0x3ff)) : half;
  return static_cast<uint16_t>(half | sign);
}

TRUESHARD_INLINE uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#define TRUESHARD_EACH_LANE for (int i = 0; i < 16; ++i)

TRUESHARD_INLINE Floats splat(float value) {
  Floats out;
  TRUESHARD_EACH_LANE out.lane[i] = value;
  return out;
}
TRUESHARD_INLINE Floats load_f32(const float* data) {
  Floats out;
  TRUESHARD_EACH_LANE out.lane[i] = data[i];
  return out;
}
TRUESHARD_INLINE Floats load_bf16(const uint16_t* data) {
  Floats out;
  TRUESHARD_EACH_LANE out.lane[i] = float_of(static_cast<uint32_t>(data[i]) << 16);
  return out;
}
TRUESHARD_INLINE Floats load_f16(const uint16_t* data) {
  Floats out;
  TRUESHARD_EACH_LANE out.lane[i] = widen_f16(data[i]);
  return out;
}
TRUESHARD_INLINE void store_f32(float* data, Floats x) { TRUESHARD_EACH_LANE data[i] = x.lane[i]; }
TRUESHARD_INLINE void store_bf16(uint16_t* data, Floats x) { TRUESHARD_EACH_LANE data[i] = narrow_bf16(x.lane[i]); }
TRUESHARD_INLINE void store_f16(uint16_t* data, Floats x) { TRUESHARD_EACH_LANE data[i] = narrow_f16(x.lane[i]); }

TRUESHARD_INLINE Floats add(Floats a, Floats b) {
  TRUESHARD_EACH_LANE a.lane[i] = a.lane[i] + b.lane[i];
  return a;
}
TRUESHARD_INLINE Floats multiply(Floats a, Floats b) {
  TRUESHARD_EACH_LANE a.lane[i] = a.lane[i] * b.lane[i];
  return a;
}
TRUESHARD_INLINE Floats divide(Floats a, Floats b) {
  TRUESHARD_EACH_LANE a.lane[i] = a.lane[i] / b.lane[i];
  return a;
}
TRUESHARD_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  TRUESHARD_EACH_LANE a.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return a;
}
// NaN when either is; the first operand's when both are. Of equal numbers (zeros of both signs) the second, as in
// maxps.
TRUESHARD_INLINE Floats maximum(Floats a, Floats b) {
  TRUESHARD_EACH_LANE a.lane[i] = a.lane[i] != a.lane[i] || a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}

// Remembers whether any number seen was inf or NaN.
struct FiniteCheck {
  uint32_t largest = 0;  // magnitude bits: inf and NaN are the largest integers
  TRUESHARD_INLINE void see(Floats x) {
    uint32_t top = largest;
    TRUESHARD_EACH_LANE {
      const uint32_t bits = bits_of(x.lane[i]) & 0x7fffffff;
      top = bits > top ? bits : top;
    }
    largest = top;
  }
  TRUESHARD_INLINE bool failed() const { return largest >= 0x7f800000; }
};

TRUESHARD_INLINE Doubles splat_f64(double value) {
  Doubles out;
  TRUESHARD_EACH_LANE out.lane[i] = value;
  return out;
}
TRUESHARD_INLINE Doubles load_f64(const double* data) {
  Doubles out;
  TRUESHARD_EACH_LANE out.lane[i] = data[i];
  return out;
}
TRUESHARD_INLINE Doubles widen(const float* data) {
  Doubles out;
  TRUESHARD_EACH_LANE out.lane[i] = data[i];
  return out;
}
TRUESHARD_INLINE Doubles add(Doubles a, Doubles b) {
  TRUESHARD_EACH_LANE a.lane[i] = a.lane[i] + b.lane[i];
  return a;
}
TRUESHARD_INLINE Doubles multiply(Doubles a, Doubles b) {
  TRUESHARD_EACH_LANE a.lane[i] = a.lane[i] * b.lane[i];
  return a;
}
TRUESHARD_INLINE Doubles magnitude(Doubles a) {
  TRUESHARD_EACH_LANE a.lane[i] = __builtin_fabs(a.lane[i]);
  return a;
}
// x * x + c where x holds fp32 values: the product is exact in fp64, so that a fused form has the same bits.
TRUESHARD_INLINE Doubles add_exact_square(Doubles x, Doubles c) { return add(multiply(x, x), c); }
// The canonical tree over the 16 lanes.
TRUESHARD_INLINE double sum_lanes(Doubles x) {
  double s[8];
  for (int i = 0; i < 8; ++i) s[i] = x.lane[2 * i] + x.lane[2 * i + 1];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

#undef TRUESHARD_EACH_LANE

}  // namespace trueshard::kernels::cpu_scalar
