// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/rows.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

template <class Type>
bool unscale_rows(void* data, int64_t count, float inverse_scale) {
  const Floats factors = splat(inverse_scale);
  FiniteCheck check;
  map_rows<Type, Type>(
      data, data, count, [ factors, &check ](Floats x) __attribute__((always_inline)) {
        check.see(x);
        return multiply(x, factors);
      });
  return check.failed();
}

bool unscale_f64(double* values, int64_t count, double inverse_scale) {
  uint64_t largest = 0;  // magnitude bits: inf and NaN are the largest integers
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = __builtin_bit_cast(uint64_t, values[i]) & 0x7fffffffffffffffu;
    largest = bits > largest ? bits : largest;
    values[i] = values[i] * inverse_scale;
  }
  return largest >= 0x7ff0000000000000u;
}

bool unscale(void* data, DType dtype, int64_t count, double inverse_scale) {
  switch (dtype) {
    case DType::kFloat32:
      return unscale_rows<Float32>(data, count, static_cast<float>(inverse_scale));
    case DType::kBFloat16:
      return unscale_rows<BFloat16>(data, count, static_cast<float>(inverse_scale));
    case DType::kFloat16:
      return unscale_rows<Float16>(data, count, static_cast<float>(inverse_scale));
    case DType::kFloat64:
      break;
  }
  return unscale_f64(static_cast<double*>(data), count, inverse_scale);
}

}  // namespace

void unscale_and_check(void* data, DType dtype, int64_t count, double inverse_scale, uint8_t* nonfinite) {
  if (unscale(data, dtype, count, inverse_scale)) *nonfinite = 1;
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
