// SPDX-License-Identifier: BSD-3-Clause
// Role: what the parity tests train: a net with many kinds of layers, a TorchScript one, their data and the loops
// around them. A Reference computes every leaf of every rank itself and follows docs/numerics.md word by word.
// Invariants: values and data depend on seeds only, never on the global generator, which rank threads share.
#pragma once
#include <torch/script.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <trueshard/trueshard.h>

#include "tests/support/toy.h"

namespace trueshard::testing {

using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;
using Parameters = std::vector<torch::Tensor>;

constexpr int64_t kTokens = 31, kWidth = 12;

struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, head{nullptr};
  NetImpl() {
    embed = register_module("embed", torch::nn::Embedding(kTokens, kWidth));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)));
    bn = register_module("bn", torch::nn::BatchNorm1d(kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 25));
    head = register_module("head", torch::nn::Linear(25, kTokens));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed->forward(tokens);
    const auto mixed = torch::gelu(bn->forward(conv->forward(x.transpose(1, 2)))).transpose(1, 2);
    x = norm->forward(x + mixed);
    return head->forward(torch::gelu(up->forward(x)));
  }
};
TORCH_MODULE(Net);

// Seeded values instead of the layers' own, which come from the global generator.
inline void fill(const Parameters& parameters, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& p : parameters) p.copy_(torch::randn(p.sizes(), generator) * 0.3 + (p.dim() == 1 ? 0.5 : 0.0));
}

// A model as the loops see it, whatever it is made of.
struct Trainee {
  std::function<torch::Tensor(const torch::Tensor&)> forward;
  Parameters parameters, buffers;
  std::function<std::unique_ptr<ShardedOptimizer>(OptimizerPointer, const c10::intrusive_ptr<c10d::ProcessGroup>&,
                                                  const ShardOptions&)>
      shard;
};

inline Trainee trainee_of(const Net& net) {
  return {[net](const torch::Tensor& tokens) { return net.ptr()->forward(tokens); }, net->parameters(), net->buffers(),
          [net](OptimizerPointer optimizer, const auto& group, const ShardOptions& options) {
            return trueshard::shard(*net.ptr(), std::move(optimizer), group, options);
          }};
}
inline Trainee eager_net(uint64_t seed = 1) {
  Net net;
  fill(net->parameters(), seed);
  return trainee_of(net);
}

inline torch::jit::Module script_module(uint64_t seed = 1) {
  torch::jit::Module inner("Inner");
  inner.register_parameter("gain", torch::empty({kWidth}), false);
  inner.register_parameter("bias", torch::empty({kWidth}), false);
  inner.register_buffer("calls", torch::zeros({1}, torch::kLong));
  inner.define(R"(
    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.layer_norm(x, [12], self.gain, self.bias)
  )");
  torch::jit::Module net("ScriptNet");
  net.register_parameter("table", torch::empty({kTokens, kWidth}), false);
  net.register_parameter("up", torch::empty({kWidth, 25}), false);
  net.register_parameter("head", torch::empty({25, kTokens}), false);
  net.register_module("norm", inner);
  net.define(R"(
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm.forward(torch.embedding(self.table, tokens))
        return torch.matmul(torch.tanh(torch.matmul(x, self.up)), self.head)
  )");
  Parameters parameters;
  for (const auto& p : net.parameters()) parameters.push_back(p);
  for (auto& p : parameters) p.set_requires_grad(true);
  fill(parameters, seed);
  return net;
}
inline Trainee script_net(uint64_t seed = 1) {
  auto net = std::make_shared<torch::jit::Module>(script_module(seed));
  Trainee trainee;
  trainee.forward = [net](const torch::Tensor& tokens) { return net->forward({tokens}).toTensor(); };
  for (const auto& p : net->parameters()) trainee.parameters.push_back(p);
  for (const auto& b : net->buffers()) trainee.buffers.push_back(b);
  trainee.shard = [net](OptimizerPointer optimizer, const auto& group, const ShardOptions& options) {
    return trueshard::shard(*net, std::move(optimizer), group, options);
  };
  return trainee;
}

// The batch that a leaf of a step sees, whichever rank computes it.
inline torch::Tensor batch(int64_t step, int64_t leaf) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * step + leaf));
  return torch::randint(0, kTokens, {4, 6}, generator, torch::kLong);
}
inline torch::Tensor loss_of(const Trainee& model, const torch::Tensor& tokens) {
  const auto logits = model.forward(tokens).to(torch::kFloat);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), (tokens * 7 + 3).remainder(kTokens).flatten());
}

inline Parameters copies(const Parameters& tensors) {
  Parameters result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}
inline Parameters contents(const Trainee& model) {  // weights, then buffers
  auto all = copies(model.parameters);
  for (const auto& buffer : copies(model.buffers)) all.push_back(buffer);
  return all;
}
// The first tensor whose bits differ, or -1.
inline int first_difference(const Parameters& a, const Parameters& b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return static_cast<int>(i);
  }
  return -1;
}

// The weights of every rank and pass of a step, reduced by the plain recursion of toy.h and stepped by libtorch's own
// optimizer on fp32 masters. `compute`: the dtype of forward and backward of the parameters for which it is set.
class Reference {
 public:
  Reference(Trainee model, int world, int passes, const std::vector<std::optional<torch::Dtype>>& compute = {})
      : model_(std::move(model)), world_(world), passes_(passes) {
    for (size_t i = 0; i < model_.parameters.size(); ++i) {
      auto& p = model_.parameters[i];
      masters.push_back(p.detach().to(torch::kFloat).clone().requires_grad_());
      if (i < compute.size() && compute[i]) p.set_data(p.detach().to(*compute[i]));
    }
  }
  void gradients(int64_t step) {
    std::vector<Parameters> leaves(masters.size());
    for (int leaf = 0; leaf < world_ * passes_; ++leaf) {
      for (auto& p : model_.parameters) p.mutable_grad() = torch::Tensor();
      loss_of(model_, batch(step, leaf)).backward();
      for (size_t i = 0; i < masters.size(); ++i) leaves[i].push_back(model_.parameters[i].grad());
    }
    for (size_t i = 0; i < masters.size(); ++i)
      masters[i].mutable_grad() = tree(leaves[i]) / static_cast<double>(world_);
  }
  void publish() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < masters.size(); ++i) model_.parameters[i].copy_(masters[i]);
  }
  const Trainee& model() const { return model_; }

  Parameters masters;

 private:
  Trainee model_;
  int world_, passes_;
};

}  // namespace trueshard::testing
