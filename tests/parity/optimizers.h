// SPDX-License-Identifier: BSD-3-Clause
// Role: every supported torch::optim optimizer in the variants that take different paths through its step.
#pragma once
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trueshard::testing {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

struct OptimizerCase {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)> make;
};
inline Groups one_group(const std::vector<torch::Tensor>& parameters) {
  return {torch::optim::OptimizerParamGroup(parameters)};
}

template <typename Optimizer, typename Options>
OptimizerCase optimizer_case(const std::string& name, const Options& options) {
  return {name, [options](const Groups& groups) { return std::make_unique<Optimizer>(groups, options); }};
}

inline const std::vector<OptimizerCase>& optimizer_cases() {
  using namespace torch::optim;
  static const std::vector<OptimizerCase> cases{
      optimizer_case<Adam>("Adam", AdamOptions(1e-2)),
      optimizer_case<Adam>("AdamDecay", AdamOptions(1e-2).weight_decay(0.1).betas({0.8, 0.97}).eps(1e-6)),
      optimizer_case<Adam>("AdamAmsgrad", AdamOptions(1e-2).amsgrad(true)),
      optimizer_case<AdamW>("AdamW", AdamWOptions(1e-2).weight_decay(0.1)),
      optimizer_case<AdamW>("AdamWAmsgrad", AdamWOptions(1e-2).amsgrad(true)),
      optimizer_case<SGD>("Sgd", SGDOptions(0.1)),
      optimizer_case<SGD>("SgdDecay", SGDOptions(0.1).weight_decay(0.01)),
      optimizer_case<SGD>("SgdMomentum", SGDOptions(0.1).momentum(0.9)),
      optimizer_case<SGD>("SgdNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
      optimizer_case<SGD>("SgdDampening", SGDOptions(0.1).momentum(0.9).dampening(0.3)),
      optimizer_case<RMSprop>("Rmsprop", RMSpropOptions(1e-3)),
      optimizer_case<RMSprop>("RmspropCentered", RMSpropOptions(1e-3).centered(true)),
      optimizer_case<RMSprop>("RmspropMomentum", RMSpropOptions(1e-3).momentum(0.9).weight_decay(0.01)),
      optimizer_case<Adagrad>("Adagrad", AdagradOptions(1e-2)),
      optimizer_case<Adagrad>("AdagradDecay", AdagradOptions(1e-2).lr_decay(0.1).initial_accumulator_value(0.5)),
  };
  return cases;
}

}  // namespace trueshard::testing
