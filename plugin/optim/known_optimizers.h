// SPDX-License-Identifier: BSD-3-Clause
// Role: what the library knows about libtorch's optimizers: which treat every element by itself, their options as text,
// and their per-parameter state, so that it can be cut into shards. Threads: pure functions. Errors: c10::Error naming
// the optimizer.
#pragma once
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>

namespace trueshard::optim {

enum class Kind { kAdam, kAdamW, kSgd, kRmsprop, kAdagrad, kUnknown };
Kind kind_of(const torch::optim::Optimizer& optimizer);
std::string type_name(const torch::optim::Optimizer& optimizer);
// Throws for LBFGS and, unless the user vouches for it, for optimizers that are not known to be element-wise.
Kind require_elementwise(const torch::optim::Optimizer& optimizer, bool assume_elementwise);
// "lr 0.001 betas (0.9, 0.999) ..."; the type's name for options that are not known.
std::string describe(const torch::optim::OptimizerOptions& options);
// "AdamW step 3 exp_avg exp_avg_sq"; empty without state.
std::string describe(Kind kind, const torch::optim::OptimizerParamState* state);
// Replaces every tensor of the state by change(tensor).
void transform_tensors(Kind kind, torch::optim::OptimizerParamState& state,
                       const std::function<at::Tensor(const at::Tensor&)>& change);

}  // namespace trueshard::optim
