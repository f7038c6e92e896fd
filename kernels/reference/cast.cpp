// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/reference/formats.h"

namespace trueshard::kernels::reference {

void cast(const void* in, DType in_dtype, void* out, DType out_dtype, int64_t count) {
  if (in_dtype == out_dtype) {
    std::memmove(out, in, static_cast<size_t>(count * itemsize(in_dtype)));
    return;
  }
  for (int64_t i = 0; i < count; ++i) store(out, out_dtype, i, load(in, in_dtype, i));
}

}  // namespace trueshard::kernels::reference
