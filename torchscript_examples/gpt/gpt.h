// SPDX-License-Identifier: BSD-3-Clause
// Role: a byte-level GPT as an ordinary torch::nn module; it knows nothing of trueshard, ranks or dtypes.
// Invariants: position t sees bytes 0..t only. No dropout: the output is a function of weights and input.
// Shapes: forward: int64 [batch, length <= context] -> logits [batch, length, vocabulary] in the dtype of the weights.
// Threads: as torch::nn. Errors: c10::Error from libtorch for wrong shapes.
#pragma once
#include <torch/torch.h>

#include <cmath>
#include <string>

namespace gpt {

struct GptOptions {
  TORCH_ARG(int64_t, vocabulary) = 256;
  TORCH_ARG(int64_t, context) = 128;
  TORCH_ARG(int64_t, width) = 128;
  TORCH_ARG(int64_t, heads) = 4;
  TORCH_ARG(int64_t, layers) = 4;
  TORCH_ARG(bool, tied) = false;  // the head uses the embedding's weights
};

class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const GptOptions& options) : heads_(options.heads()) {
    TORCH_CHECK(options.width() % heads_ == 0, "gpt: width ", options.width(), " is no multiple of ", heads_, " heads");
    qkv_ = register_module("qkv", torch::nn::Linear(options.width(), 3 * options.width()));
    out_ = register_module("out", torch::nn::Linear(options.width(), options.width()));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    auto split = qkv_->forward(x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
    auto mixed = at::scaled_dot_product_attention(split[0], split[1], split[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                  /*is_causal=*/true);
    return out_->forward(mixed.transpose(1, 2).reshape({batch, length, width}));
  }

 private:
  int64_t heads_;
  torch::nn::Linear qkv_{nullptr}, out_{nullptr};
};
TORCH_MODULE(Attention);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options) {
    const auto width = options.width();
    norm_attention_ = register_module("norm_attention", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention_ = register_module("attention", Attention(options));
    norm_mlp_ = register_module("norm_mlp", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up_ = register_module("up", torch::nn::Linear(width, 4 * width));
    down_ = register_module("down", torch::nn::Linear(4 * width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = x + attention_->forward(norm_attention_->forward(x));
    return y + down_->forward(torch::gelu(up_->forward(norm_mlp_->forward(y))));
  }

 private:
  torch::nn::LayerNorm norm_attention_{nullptr}, norm_mlp_{nullptr};
  Attention attention_{nullptr};
  torch::nn::Linear up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptOptions& options) : options_(options) {
    tokens_ = register_module("tokens", torch::nn::Embedding(options.vocabulary(), options.width()));
    positions_ = register_module("positions", torch::nn::Embedding(options.context(), options.width()));
    for (int64_t layer = 0; layer < options.layers(); ++layer) {
      blocks_.push_back(register_module("block" + std::to_string(layer), Block(options)));
    }
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width()})));
    if (!options.tied()) {
      head_ = register_module(
          "head", torch::nn::Linear(torch::nn::LinearOptions(options.width(), options.vocabulary()).bias(false)));
    }
    initialise();
  }

  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = tokens_->forward(ids) + positions_->weight.slice(/*dim=*/0, 0, ids.size(1));
    for (auto& block : blocks_) x = block->forward(x);
    return torch::linear(norm_->forward(x), options_.tied() ? tokens_->weight : head_->weight);
  }

  const GptOptions& options() const { return options_; }

 private:
  // Normal(0, 0.02), biases 0; what writes into the residual stream is smaller, since 2 * layers of them add up.
  void initialise() {
    torch::NoGradGuard no_grad;
    const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(options_.layers()));
    for (const auto& item : named_parameters()) {
      const auto& name = item.key();
      if (name.find("norm") != std::string::npos) continue;
      if (item.value().dim() < 2) {
        item.value().zero_();
      } else {
        const bool into_residual = name.find(".out.") != std::string::npos || name.find(".down.") != std::string::npos;
        item.value().normal_(0.0, into_residual ? residual : 0.02);
      }
    }
  }

  GptOptions options_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Gpt);

}  // namespace gpt
