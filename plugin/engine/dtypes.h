// SPDX-License-Identifier: BSD-3-Clause
// Role: the dtypes the engine reduces and the kernels' names for them. Pure functions; unsupported dtypes are a
// c10::Error.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "kernels/kernels.h"

namespace trueshard::engine {

inline bool is_reducible(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 || dtype == c10::kHalf;
}
inline bool is_16bit(c10::ScalarType dtype) { return dtype == c10::kBFloat16 || dtype == c10::kHalf; }

inline kernels::DType kernel_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return kernels::DType::kFloat32;
    case c10::kDouble:
      return kernels::DType::kFloat64;
    case c10::kBFloat16:
      return kernels::DType::kBFloat16;
    case c10::kHalf:
      return kernels::DType::kFloat16;
    default:
      TORCH_CHECK(false, "trueshard: ", c10::toString(dtype),
                  " is not a dtype that gradients can have; expected float32, float64, bfloat16 or float16");
  }
}
inline c10::ScalarType scalar_type(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat32:
      return c10::kFloat;
    case kernels::DType::kFloat64:
      return c10::kDouble;
    case kernels::DType::kBFloat16:
      return c10::kBFloat16;
    case kernels::DType::kFloat16:
      return c10::kHalf;
  }
  return c10::kFloat;
}
// What sums, masters and optimizer state are kept in for a parameter of this dtype.
inline c10::ScalarType master_dtype_of(c10::ScalarType dtype) {
  return dtype == c10::kDouble ? c10::kDouble : c10::kFloat;
}

}  // namespace trueshard::engine
