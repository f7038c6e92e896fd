// SPDX-License-Identifier: BSD-3-Clause
// Role: what the loop trains: the torch::nn module of gpt.h, or a TorchScript file with the same signature (script.py
// writes one). The loop is the same for both, and so is the call of trueshard::shard().
// Shapes: forward: int64 [batch, length <= context] -> logits [batch, length, vocabulary]. Threads: as torch::nn.
// Errors: c10::Error.
#pragma once
#include <torch/script.h>
#include <trueshard/trueshard.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torchscript_examples/gpt/gpt.h"

namespace gpt {

class Model {
 public:
  // `script`: file of a TorchScript module; empty: a new Gpt with these options.
  Model(const GptOptions& options, const std::string& script) {
    if (script.empty()) {
      module_ = Gpt(options);
    } else {
      script_ = torch::jit::load(script);
    }
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    return script_ ? script_->forward({ids}).toTensor() : module_->forward(ids);
  }
  std::vector<torch::Tensor> parameters() const {
    if (!script_) return module_->parameters();
    std::vector<torch::Tensor> all;
    for (const auto& parameter : script_->parameters()) all.push_back(parameter);
    return all;
  }
  void train(bool on) {
    if (script_) {
      script_->train(on);
    } else {
      module_->train(on);
    }
  }
  template <typename Optimizer>
  std::unique_ptr<trueshard::ShardedOptimizer> shard(Optimizer&& optimizer,
                                                     const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     const trueshard::ShardOptions& options) {
    if (script_) return trueshard::shard(*script_, std::forward<Optimizer>(optimizer), group, options);
    return trueshard::shard(*module_, std::forward<Optimizer>(optimizer), group, options);
  }

 private:
  Gpt module_{nullptr};
  std::optional<torch::jit::Module> script_;
};

// Mean cross entropy in nats per byte, in fp32 whatever the model computes in. `windows` is int64 [batch, length + 1].
inline torch::Tensor loss_of(Model& model, const torch::Tensor& windows) {
  const auto length = windows.size(1) - 1;
  auto logits = model.forward(windows.slice(/*dim=*/1, 0, length));
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(torch::kFloat),
                                              windows.slice(/*dim=*/1, 1, length + 1).flatten());
}

}  // namespace gpt
