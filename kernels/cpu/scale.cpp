// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/rows.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

template <class Type>
void scale_rows(void* data, int64_t count, float factor) {
  const Floats factors = splat(factor);
  map_rows<Type, Type>(
      data, data, count, [factors](Floats x) __attribute__((always_inline)) { return multiply(x, factors); });
}

}  // namespace

void scale(void* data, DType dtype, int64_t count, double factor) {
  switch (dtype) {
    case DType::kFloat32:
      return scale_rows<Float32>(data, count, static_cast<float>(factor));
    case DType::kBFloat16:
      return scale_rows<BFloat16>(data, count, static_cast<float>(factor));
    case DType::kFloat16:
      return scale_rows<Float16>(data, count, static_cast<float>(factor));
    case DType::kFloat64:
      break;
  }
  auto* values = static_cast<double*>(data);
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] * factor;
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
