// SPDX-License-Identifier: BSD-3-Clause
// Role: a small training run with everything in it that a checkpoint must carry: dropout with each rank's own random
// numbers, batch norm, a scaler that overflows once, a schedule, a counter. Errors: as torch's.
#pragma once
#include <torch/torch.h>

#include <memory>
#include <string>

#include <trueshard/trueshard.h>

#include "tests/support/toy.h"

namespace trueshard::testing {

struct SmallNetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  SmallNetImpl() {
    first = register_module("first", torch::nn::Linear(7, 19));
    norm = register_module("norm", torch::nn::BatchNorm1d(19));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
    out = register_module("out", torch::nn::Linear(19, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(dropout(torch::relu(norm(first(x))))); }
};
TORCH_MODULE(SmallNet);

// Values of its own generator: rank threads share the global one.
inline SmallNet seeded_net(int64_t seed) {
  SmallNet net;
  const torch::NoGradGuard no_grad;
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  for (const auto& parameter : net->parameters()) parameter.copy_(torch::randn(parameter.sizes(), generator) * 0.3);
  return net;
}

inline torch::Tensor batch_of(int64_t step, int64_t leaf) { return random_values(1000 * step + leaf, {8, 7}) * 1e-2; }

struct TrainingRun {
  SmallNet net;
  std::unique_ptr<ShardedOptimizer> optimizer;
  ShardedGradScaler scaler;
  torch::optim::StepLR schedule;
  int64_t step = 0;
  CheckpointState state;

  TrainingRun(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const ShardOptions& options, int64_t seed = 0)
      : net(seeded(seed)),
        optimizer(
            shard(*net, torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(1e-2)), group, options)),
        scaler(group, GradScalerOptions().init_scale(1024.0).growth_interval(4)),
        schedule(*optimizer, 2, 0.5) {
    state.add("trainer", *optimizer);
    state.add("scaler", scaler);
    state.add("schedule", schedule);
    state.add("step", step);
    torch::manual_seed(100 + seed + group->getRank());
  }
  static SmallNet seeded(int64_t seed) { return seeded_net(seed); }

  void one_step() {
    optimizer->zero_grad();
    auto loss = net(batch_of(step, optimizer->group()->getRank())).square().mean();
    if (step == 1) loss = loss * 1e38;  // overflows once the scale is on it
    scaler.scale(loss).backward();
    scaler.unscale_(*optimizer);
    clip_grad_norm_(*optimizer, 0.25);
    if (scaler.step(*optimizer)) schedule.step();
    scaler.update();
    ++step;
  }

  // Everything that must come back, as text.
  std::string digest() {
    std::string text = "step " + std::to_string(step);
    {
      const FullParametersGuard whole(*optimizer);
      text += " weights " + std::to_string(testing::digest(net->parameters()));
    }
    text += " buffers " + std::to_string(testing::digest(net->buffers()));
    std::vector<torch::Tensor> moments;
    for (auto& group : optimizer->param_groups()) {
      text += " lr " + std::to_string(group.options().get_lr() * 1e9);
      for (auto& shard : group.params()) {
        auto& adam = static_cast<torch::optim::AdamWParamState&>(
            *optimizer->torch::optim::Optimizer::state().at(shard.unsafeGetTensorImpl()));
        moments.push_back(adam.exp_avg());
        moments.push_back(adam.exp_avg_sq());
        moments.push_back(torch::scalar_tensor(adam.step(), torch::kLong));
      }
    }
    text += " moments " + std::to_string(testing::digest(moments));
    text += " scale " + std::to_string(scaler.get_scale()) + " tracker " + std::to_string(scaler.growth_tracker());
    text += " skipped " + std::to_string(scaler.skipped_steps());
    text += " steps " + std::to_string(optimizer->metrics().steps);
    return text + " next random " + std::to_string(torch::randint(1 << 30, {1}, torch::kLong).item<int64_t>());
  }
};

}  // namespace trueshard::testing
