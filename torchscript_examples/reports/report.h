// SPDX-License-Identifier: BSD-3-Clause
// Role: what the reports share: a small language model, its data, ranks as threads of one process, digests.
// Invariants: every value depends on seeds only; the leaf (step, number) sees the same batch in every run.
#pragma once
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include <trueshard/trueshard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace reports {

constexpr int64_t kTokens = 64;

struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear up{nullptr}, head{nullptr};
  NetImpl() {
    embed = register_module("embed", torch::nn::Embedding(kTokens, 24));
    up = register_module("up", torch::nn::Linear(24, 48));
    head = register_module("head", torch::nn::Linear(48, kTokens));
    const torch::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(1);
    for (const auto& p : parameters()) p.copy_(torch::randn(p.sizes(), generator) * 0.4);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return head->forward(torch::gelu(up->forward(embed->forward(tokens))));
  }
};
TORCH_MODULE(Net);

// The model has to learn which token follows which.
inline torch::Tensor loss_of(Net& net, const torch::Tensor& tokens) {
  const auto next = (tokens * 5 + 11).remainder(kTokens);
  return torch::nn::functional::cross_entropy(net->forward(tokens).to(torch::kFloat), next);
}
inline torch::Tensor batch(int64_t step, int64_t leaf, int64_t size) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 * step + leaf));
  return torch::randint(0, kTokens, {size}, generator, torch::kLong);
}
inline float loss_over_all_tokens(Net& net) {
  const torch::NoGradGuard no_grad;
  return loss_of(net, torch::arange(kTokens)).item<float>();
}

inline torch::Tensor flat(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> pieces;
  for (const auto& tensor : tensors) pieces.push_back(tensor.detach().to(torch::kFloat).flatten());
  return torch::cat(pieces);
}
// FNV-1a over the bytes: equal digests, equal bits.
inline uint64_t digest(const torch::Tensor& tensor) {
  uint64_t hash = 14695981039346656037ull;
  const auto bytes = tensor.contiguous();
  const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
  for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  return hash;
}

// Whole fp32 weights of a sharded run.
inline torch::Tensor masters(trueshard::ShardedOptimizer& optimizer) {
  std::vector<torch::Tensor> tensors;
  for (const auto& item : trueshard::full_state_dict(optimizer)) tensors.push_back(item.value());
  return flat(tensors);
}

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Calls rank(rank, group) on a thread for each rank; the first error is thrown here.
inline void run_ranks(int world, const std::function<void(int, const Group&)>& rank_program) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        rank_program(rank, trueshard::init_process_group(store, rank, world));
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace reports
