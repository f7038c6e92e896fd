// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/reference/formats.h"

namespace trueshard::kernels::reference {

void scale(void* data, DType dtype, int64_t count, double factor) {
  for (int64_t i = 0; i < count; ++i) {
    const double value = load(data, dtype, i);
    if (dtype == DType::kFloat64) {
      store(data, dtype, i, value * factor);
    } else {
      store(data, dtype, i, static_cast<float>(value) * static_cast<float>(factor));
    }
  }
}

}  // namespace trueshard::kernels::reference
