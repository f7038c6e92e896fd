// SPDX-License-Identifier: BSD-3-Clause
// Role: one gradient norm over sharded gradients and one factor for all of them (docs/numerics.md section 3).
// Invariants: the returned number has the same bits on every rank and for every world size, stage and bucket size. The
// 2-norm is within 1e-6 of the fp64 norm and does not overflow. Every logical element counts once. Threads: as the
// optimizer. Errors: c10::Error on all ranks, before anything is altered.
#pragma once
#include <string>
#include <vector>

#include <trueshard/sharded_optimizer.h>

namespace trueshard {

// coef = max_norm / (norm + 1e-6) multiplies all gradients when it is below 1. norm_type: any number > 0, or infinity.
// A non-finite norm alters nothing: it is returned, or with error_if_nonfinite it is an error on all ranks.
// Gradients that are still scaled are an error that names ShardedGradScaler::unscale_. Collective; finishes the
// reduction.
TRUESHARD_API double clip_grad_norm_(ShardedOptimizer& optimizer, double max_norm, double norm_type = 2.0,
                                     bool error_if_nonfinite = false);
// One norm over all the optimizers' gradients, in the given order; a parameter that two of them share counts at the
// first.
TRUESHARD_API double clip_grad_norm_(const std::vector<ShardedOptimizer*>& optimizers, double max_norm,
                                     double norm_type = 2.0, bool error_if_nonfinite = false);
// norm_type as text: "inf", or a number.
TRUESHARD_API double clip_grad_norm_(ShardedOptimizer& optimizer, double max_norm, const std::string& norm_type,
                                     bool error_if_nonfinite = false);

}  // namespace trueshard
