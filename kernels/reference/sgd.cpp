// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/optimizer_scalars.h"
#include "kernels/reference/optimizer_steps.h"

namespace trueshard::kernels::reference {

void sgd(const SgdCall& call) {
  const SgdScalars s = sgd_scalars(call);
  const bool fused = call.vector_fma;
  for (int64_t i = 0; i < call.count; ++i) {
    float direction = factored(call.gradient[i], call.factors);
    if (s.decay) direction = add_scaled(direction, call.parameter[i], s.weight_decay, fused);
    if (call.momentum_buffer != nullptr) {
      float& buffer = call.momentum_buffer[i];
      buffer = call.first_step ? direction : add_scaled(buffer * s.momentum, direction, s.one_minus_dampening, fused);
      direction = call.nesterov ? add_scaled(direction, buffer, s.momentum, fused) : buffer;
    }
    call.parameter[i] = add_scaled(call.parameter[i], direction, s.minus_lr, fused);
    write_copy(call.copy, i, call.parameter[i]);
  }
}

}  // namespace trueshard::kernels::reference
