// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/names.h"

#include <array>

namespace trueshard::comm {

std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Byte:
      return "uint8";
    case c10::ScalarType::Char:
      return "int8";
    case c10::ScalarType::Short:
      return "int16";
    case c10::ScalarType::Int:
      return "int32";
    case c10::ScalarType::Long:
      return "int64";
    case c10::ScalarType::Bool:
      return "bool";
    case c10::ScalarType::ComplexFloat:
      return "complex64";
    case c10::ScalarType::ComplexDouble:
      return "complex128";
    default:
      return c10::toString(dtype);
  }
}

std::string reduction_name(int reduction) {
  static constexpr std::array kNames{"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  if (reduction < 0 || static_cast<size_t>(reduction) >= kNames.size()) return "reduction " + std::to_string(reduction);
  return kNames[static_cast<size_t>(reduction)];
}

}  // namespace trueshard::comm
