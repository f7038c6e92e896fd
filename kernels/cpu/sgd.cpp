// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/optimizer_rows.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

template <bool kFused>
TRUESHARD_INLINE void sgd_row(const SgdCall& call, const SgdScalars& s, int64_t i, int64_t part) {
  Floats parameter = load_row(call.parameter + i, part);
  Floats direction = load_gradient(call.gradient + i, part, call.factors);
  if (s.decay) direction = add_scaled<kFused>(direction, parameter, splat(s.weight_decay));
  if (call.momentum_buffer != nullptr) {
    Floats buffer = direction;
    if (!call.first_step) {
      const Floats faded = multiply(load_row(call.momentum_buffer + i, part), splat(s.momentum));
      buffer = add_scaled<kFused>(faded, direction, splat(s.one_minus_dampening));
    }
    store_row(call.momentum_buffer + i, part, buffer);
    direction = call.nesterov ? add_scaled<kFused>(direction, buffer, splat(s.momentum)) : buffer;
  }
  parameter = add_scaled<kFused>(parameter, direction, splat(s.minus_lr));
  store_row(call.parameter + i, part, parameter);
  write_copy(call.copy, i, part, parameter);
}

template <bool kFused>
void sgd_rows(const SgdCall& call) {
  const SgdScalars s = sgd_scalars(call);
  each_row(
      0,
      call.count, [&](int64_t i, int64_t part) __attribute__((always_inline)) { sgd_row<kFused>(call, s, i, part); });
}

}  // namespace

void sgd(const SgdCall& call) {
  if (call.vector_fma) {
    sgd_rows<true>(call);
  } else {
    sgd_rows<false>(call);
  }
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
