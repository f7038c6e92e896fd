// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "kernels/reference/formats.h"

namespace trueshard::kernels::reference {
namespace {

double contribution(const NormCall& call, double value) {
  switch (call.kind) {
    case NormKind::kSquare:
      return (value * call.scale) * (value * call.scale);
    case NormKind::kAbsolute:
    case NormKind::kMaximum:
      return std::fabs(value);
    case NormKind::kPower:
      return std::pow(std::fabs(value) * call.scale, call.power);
  }
  return 0;
}

double block_maximum(const double* values, int64_t count) {
  double maximum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) return std::nan("");
    maximum = std::max(maximum, values[i]);
  }
  return maximum;
}

}  // namespace

void norm_blocks(const NormCall& call) {
  for (int64_t begin = 0; begin < call.count; begin += kBlock) {
    const int64_t count = std::min(kBlock, call.count - begin);
    double values[kBlock];
    for (int64_t i = 0; i < count; ++i) values[i] = contribution(call, load(call.data, call.dtype, begin + i));
    call.block_values[begin / kBlock] =
        call.kind == NormKind::kMaximum ? block_maximum(values, count) : block_sum(values, count);
  }
}

}  // namespace trueshard::kernels::reference
