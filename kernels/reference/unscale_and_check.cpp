// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/reference/formats.h"

namespace trueshard::kernels::reference {

void unscale_and_check(void* data, DType dtype, int64_t count, double inverse_scale, uint8_t* nonfinite) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(load(data, dtype, i))) *nonfinite = 1;
  }
  scale(data, dtype, count, inverse_scale);
}

}  // namespace trueshard::kernels::reference
