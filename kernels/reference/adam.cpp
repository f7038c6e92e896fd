// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "kernels/optimizer_scalars.h"
#include "kernels/reference/optimizer_steps.h"

namespace trueshard::kernels::reference {

void adam(const AdamCall& call) {
  const AdamScalars s = adam_scalars(call);
  const bool fused = call.vector_fma;
  for (int64_t i = 0; i < call.count; ++i) {
    float gradient = factored(call.gradient[i], call.factors);
    if (s.l2) gradient = add_scaled(gradient, call.parameter[i], s.weight_decay, fused);
    call.exp_avg[i] = add_scaled(call.exp_avg[i] * s.beta1, gradient, s.one_minus_beta1, fused);
    call.exp_avg_sq[i] = add_scaled(call.exp_avg_sq[i] * s.beta2, gradient, s.one_minus_beta2 * gradient, fused);
    float second = call.exp_avg_sq[i];
    if (call.max_exp_avg_sq != nullptr) {
      const float largest = call.max_exp_avg_sq[i];
      if (!std::isnan(second) && !(second > largest)) second = largest;
      call.max_exp_avg_sq[i] = second;
    }
    call.sqrt(&second, 1);
    const float denominator = second / s.root_correction + s.eps;
    if (s.decouple) call.parameter[i] = call.parameter[i] * s.keep;
    call.parameter[i] = call.parameter[i] + s.minus_step_size * call.exp_avg[i] / denominator;
    write_copy(call.copy, i, call.parameter[i]);
  }
}

}  // namespace trueshard::kernels::reference
