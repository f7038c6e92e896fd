// SPDX-License-Identifier: BSD-3-Clause
// Role: what the library knows about libtorch's optimizers: which treat every element by itself, their options as text,
// and their per-parameter state, so that it can be cut into shards. Threads: pure functions. Errors: c10::Error naming
// the optimizer.
#pragma once
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

// The same by name, for checkpoints. Tensors that are there, in a fixed order; step: nothing where the type counts
// none.
struct StateField {
  std::string name;  // "exp_avg"
  at::Tensor tensor;
};
std::vector<StateField> state_fields(Kind kind, const torch::optim::OptimizerParamState& state);
std::optional<int64_t> state_step(Kind kind, const torch::optim::OptimizerParamState& state);
bool has_state_field(Kind kind, const std::string& name);  // "step" included, where the type counts steps
std::unique_ptr<torch::optim::OptimizerParamState> make_state(Kind kind, std::optional<int64_t> step,
                                                              const std::vector<StateField>& fields);
// Options as numbers and flags; empty for a type that is not known.
struct OptionField {
  std::string name;  // "lr"
  double value = 0;
  bool is_flag = false;
  bool operator==(const OptionField&) const = default;
};
std::vector<OptionField> option_fields(const torch::optim::OptimizerOptions& options);
// `fields` must have the same names; throws before anything is set.
void set_option_fields(torch::optim::OptimizerOptions& options, const std::vector<OptionField>& fields);

}  // namespace trueshard::optim
