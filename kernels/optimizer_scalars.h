// SPDX-License-Identifier: BSD-3-Clause
// Role: the scalars of one optimizer step, computed in double and rounded to fp32 where libtorch rounds them.
// Invariants: the same expressions, in the same order, as torch::optim's C++ sources evaluate.
// Shapes: none. Threads: pure. Errors: none.
#pragma once
#include "kernels/kernels.h"

namespace trueshard::kernels {

struct AdamScalars {
  bool decouple;  // parameter *= keep before the update
  bool l2;        // gradient += weight_decay * parameter before the moments
  float keep, weight_decay;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float root_correction, eps, minus_step_size;
};
AdamScalars adam_scalars(const AdamCall& call);

struct SgdScalars {
  bool decay;
  float weight_decay, momentum, one_minus_dampening, minus_lr;
};
SgdScalars sgd_scalars(const SgdCall& call);

}  // namespace trueshard::kernels
