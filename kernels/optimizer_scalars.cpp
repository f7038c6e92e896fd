// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/optimizer_scalars.h"

#include <cmath>

namespace trueshard::kernels {

AdamScalars adam_scalars(const AdamCall& call) {
  const double step = static_cast<double>(call.step);
  const double correction1 = 1 - std::pow(call.beta1, step);
  const double correction2 = 1 - std::pow(call.beta2, step);
  const double step_size = call.lr / correction1;
  AdamScalars scalars;
  scalars.decouple = call.decoupled && call.weight_decay != 0;
  scalars.l2 = !call.decoupled && call.weight_decay != 0;
  scalars.keep = static_cast<float>(1 - call.lr * call.weight_decay);
  scalars.weight_decay = static_cast<float>(call.weight_decay);
  scalars.beta1 = static_cast<float>(call.beta1);
  scalars.one_minus_beta1 = static_cast<float>(1 - call.beta1);
  scalars.beta2 = static_cast<float>(call.beta2);
  scalars.one_minus_beta2 = static_cast<float>(1 - call.beta2);
  scalars.root_correction = static_cast<float>(std::sqrt(correction2));
  scalars.eps = static_cast<float>(call.eps);
  scalars.minus_step_size = static_cast<float>(-step_size);
  return scalars;
}

SgdScalars sgd_scalars(const SgdCall& call) {
  SgdScalars scalars;
  scalars.decay = call.weight_decay != 0;
  scalars.weight_decay = static_cast<float>(call.weight_decay);
  scalars.momentum = static_cast<float>(call.momentum);
  scalars.one_minus_dampening = static_cast<float>(1 - call.dampening);
  scalars.minus_lr = static_cast<float>(-1 * call.lr);
  return scalars;
}

}  // namespace trueshard::kernels
