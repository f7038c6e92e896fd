// SPDX-License-Identifier: BSD-3-Clause
// Role: rows of 16 numbers in AVX2 registers, lane by lane as vec_scalar.h.
// Invariants: one IEEE operation per lane and call. Shapes: 16 lanes. Threads: pure. Errors: none.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace trueshard::kernels::cpu_avx2 {

struct Floats {
  __m256 low, high;
};
struct Doubles {
  __m256d part[4];
};

TRUESHARD_INLINE Floats splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
TRUESHARD_INLINE Floats load_f32(const float* data) { return {_mm256_loadu_ps(data), _mm256_loadu_ps(data + 8)}; }
TRUESHARD_INLINE __m128i load_eight(const uint16_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}
TRUESHARD_INLINE __m256 widen_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
TRUESHARD_INLINE Floats load_bf16(const uint16_t* data) {
  return {widen_bf16(load_eight(data)), widen_bf16(load_eight(data + 8))};
}
TRUESHARD_INLINE Floats load_f16(const uint16_t* data) {
  return {_mm256_cvtph_ps(load_eight(data)), _mm256_cvtph_ps(load_eight(data + 8))};
}
TRUESHARD_INLINE void store_f32(float* data, Floats x) {
  _mm256_storeu_ps(data, x.low);
  _mm256_storeu_ps(data + 8, x.high);
}
// The rounded upper halves, each in the low 16 bits of its lane.
TRUESHARD_INLINE __m256i narrow_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
TRUESHARD_INLINE void store_bf16(uint16_t* data, Floats x) {
  const __m256i packed = _mm256_packus_epi32(narrow_bf16(x.low), narrow_bf16(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), _mm256_permute4x64_epi64(packed, 0xd8));
}
TRUESHARD_INLINE void store_f16(uint16_t* data, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(data), _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(data + 8), _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}

TRUESHARD_INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
TRUESHARD_INLINE Floats multiply(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
TRUESHARD_INLINE Floats divide(Floats a, Floats b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
TRUESHARD_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// maxps returns its second operand when either is NaN: b when b is NaN; a's NaN is put back.
TRUESHARD_INLINE __m256 maximum(__m256 a, __m256 b) {
  return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
TRUESHARD_INLINE Floats maximum(Floats a, Floats b) { return {maximum(a.low, b.low), maximum(a.high, b.high)}; }

struct FiniteCheck {
  __m256i largest = _mm256_setzero_si256();  // magnitude bits: inf and NaN are the largest integers
  TRUESHARD_INLINE void see(Floats x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x.low), mask));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x.high), mask));
  }
  TRUESHARD_INLINE bool failed() const {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff))) != 0;
  }
};

TRUESHARD_INLINE Doubles splat_f64(double value) {
  const __m256d part = _mm256_set1_pd(value);
  return {{part, part, part, part}};
}
TRUESHARD_INLINE Doubles load_f64(const double* data) {
  return {{_mm256_loadu_pd(data), _mm256_loadu_pd(data + 4), _mm256_loadu_pd(data + 8), _mm256_loadu_pd(data + 12)}};
}
TRUESHARD_INLINE Doubles widen(const float* data) {
  return {{_mm256_cvtps_pd(_mm_loadu_ps(data)), _mm256_cvtps_pd(_mm_loadu_ps(data + 4)),
           _mm256_cvtps_pd(_mm_loadu_ps(data + 8)), _mm256_cvtps_pd(_mm_loadu_ps(data + 12))}};
}
TRUESHARD_INLINE Doubles add(Doubles a, Doubles b) {
  for (int i = 0; i < 4; ++i) a.part[i] = _mm256_add_pd(a.part[i], b.part[i]);
  return a;
}
TRUESHARD_INLINE Doubles multiply(Doubles a, Doubles b) {
  for (int i = 0; i < 4; ++i) a.part[i] = _mm256_mul_pd(a.part[i], b.part[i]);
  return a;
}
TRUESHARD_INLINE Doubles magnitude(Doubles a) {
  for (int i = 0; i < 4; ++i) a.part[i] = _mm256_andnot_pd(_mm256_set1_pd(-0.0), a.part[i]);
  return a;
}
TRUESHARD_INLINE Doubles add_exact_square(Doubles x, Doubles c) {
  for (int i = 0; i < 4; ++i) c.part[i] = _mm256_fmadd_pd(x.part[i], x.part[i], c.part[i]);
  return c;
}
TRUESHARD_INLINE double sum_lanes(Doubles x) {
  // Lanes 4i..4i+3 in part i. hadd: pairs of parts i and j, within 128-bit halves: (i01, j01, i23, j23).
  const __m256d pairs0 = _mm256_hadd_pd(x.part[0], x.part[1]);
  const __m256d pairs1 = _mm256_hadd_pd(x.part[2], x.part[3]);
  const __m128d fours0 = _mm_add_pd(_mm256_castpd256_pd128(pairs0), _mm256_extractf128_pd(pairs0, 1));
  const __m128d fours1 = _mm_add_pd(_mm256_castpd256_pd128(pairs1), _mm256_extractf128_pd(pairs1, 1));
  const __m128d eights = _mm_hadd_pd(fours0, fours1);
  return _mm_cvtsd_f64(eights) + _mm_cvtsd_f64(_mm_unpackhi_pd(eights, eights));
}

}  // namespace trueshard::kernels::cpu_avx2
