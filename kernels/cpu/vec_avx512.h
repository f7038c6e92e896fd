// SPDX-License-Identifier: BSD-3-Clause
// Role: rows of 16 numbers in AVX-512 registers (F, BW, DQ, VL), lane by lane as vec_scalar.h.
// Invariants: one IEEE operation per lane and call. vcvtneps2bf16 is not used: it flushes denormals.
// Shapes: 16 lanes. Threads: pure. Errors: none.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace trueshard::kernels::cpu_avx512 {

struct Floats {
  __m512 all;
};
struct Doubles {
  __m512d low, high;
};

TRUESHARD_INLINE Floats splat(float value) { return {_mm512_set1_ps(value)}; }
TRUESHARD_INLINE Floats load_f32(const float* data) { return {_mm512_loadu_ps(data)}; }
TRUESHARD_INLINE __m256i load_sixteen(const uint16_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}
TRUESHARD_INLINE Floats load_bf16(const uint16_t* data) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_sixteen(data)), 16))};
}
TRUESHARD_INLINE Floats load_f16(const uint16_t* data) { return {_mm512_cvtph_ps(load_sixteen(data))}; }
TRUESHARD_INLINE void store_f32(float* data, Floats x) { _mm512_storeu_ps(data, x.all); }
TRUESHARD_INLINE void store_bf16(uint16_t* data, Floats x) {
  const __m512i bits = _mm512_castps_si512(x.all);
  const __m512i upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.all, x.all, _CMP_UNORD_Q);
  const __m512i halves = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm512_cvtepi32_epi16(halves));
}
TRUESHARD_INLINE void store_f16(uint16_t* data, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm512_cvtps_ph(x.all, _MM_FROUND_TO_NEAREST_INT));
}

TRUESHARD_INLINE Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.all, b.all)}; }
TRUESHARD_INLINE Floats multiply(Floats a, Floats b) { return {_mm512_mul_ps(a.all, b.all)}; }
TRUESHARD_INLINE Floats divide(Floats a, Floats b) { return {_mm512_div_ps(a.all, b.all)}; }
TRUESHARD_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  return {_mm512_fmadd_ps(a.all, b.all, c.all)};
}
// maxps returns its second operand when either is NaN: b when b is NaN; a's NaN is put back.
TRUESHARD_INLINE Floats maximum(Floats a, Floats b) {
  return {_mm512_mask_mov_ps(_mm512_max_ps(a.all, b.all), _mm512_cmp_ps_mask(a.all, a.all, _CMP_UNORD_Q), a.all)};
}

struct FiniteCheck {
  __m512i largest = _mm512_setzero_si512();  // magnitude bits: inf and NaN are the largest integers
  TRUESHARD_INLINE void see(Floats x) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.all), _mm512_set1_epi32(0x7fffffff));
    largest = _mm512_max_epi32(largest, bits);
  }
  TRUESHARD_INLINE bool failed() const { return _mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7f7fffff)) != 0; }
};

TRUESHARD_INLINE Doubles splat_f64(double value) { return {_mm512_set1_pd(value), _mm512_set1_pd(value)}; }
TRUESHARD_INLINE Doubles load_f64(const double* data) { return {_mm512_loadu_pd(data), _mm512_loadu_pd(data + 8)}; }
TRUESHARD_INLINE Doubles widen(const float* data) {
  return {_mm512_cvtps_pd(_mm256_loadu_ps(data)), _mm512_cvtps_pd(_mm256_loadu_ps(data + 8))};
}
TRUESHARD_INLINE Doubles add(Doubles a, Doubles b) {
  return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)};
}
TRUESHARD_INLINE Doubles multiply(Doubles a, Doubles b) {
  return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)};
}
TRUESHARD_INLINE Doubles magnitude(Doubles a) { return {_mm512_abs_pd(a.low), _mm512_abs_pd(a.high)}; }
TRUESHARD_INLINE Doubles add_exact_square(Doubles x, Doubles c) {
  return {_mm512_fmadd_pd(x.low, x.low, c.low), _mm512_fmadd_pd(x.high, x.high, c.high)};
}
TRUESHARD_INLINE double sum_lanes(Doubles x) {
  // Pairs p0..p7 of lanes, in the order p0 p4 p1 p5 p2 p6 p3 p7.
  const __m512d pairs = _mm512_add_pd(_mm512_unpacklo_pd(x.low, x.high), _mm512_unpackhi_pd(x.low, x.high));
  // (p0 + p1, p4 + p5) and (p2 + p3, p6 + p7)
  const __m256d front = _mm512_castpd512_pd256(pairs), back = _mm512_extractf64x4_pd(pairs, 1);
  const __m128d fours0 = _mm_add_pd(_mm256_castpd256_pd128(front), _mm256_extractf128_pd(front, 1));
  const __m128d fours1 = _mm_add_pd(_mm256_castpd256_pd128(back), _mm256_extractf128_pd(back, 1));
  const __m128d eights = _mm_add_pd(fours0, fours1);
  return _mm_cvtsd_f64(eights) + _mm_cvtsd_f64(_mm_unpackhi_pd(eights, eights));
}

}  // namespace trueshard::kernels::cpu_avx512
