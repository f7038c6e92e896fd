// SPDX-License-Identifier: BSD-3-Clause
// Role: modules with parameters of any shape, exact gradients for them, and the canonical tree as plain recursion.
#pragma once
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include <trueshard/trueshard.h>

namespace trueshard::testing {

struct ToyImpl : torch::nn::Module {
  std::vector<torch::Tensor> tensors;
  explicit ToyImpl(const std::vector<torch::Tensor>& values) {
    for (size_t i = 0; i < values.size(); ++i)
      tensors.push_back(register_parameter("p" + std::to_string(i), values[i].clone()));
  }
};
TORCH_MODULE(Toy);

inline Toy toy_of(const std::vector<torch::Tensor>& values) { return Toy(std::make_shared<ToyImpl>(values)); }
inline Toy toy(const std::vector<std::vector<float>>& values, torch::Dtype dtype = torch::kFloat) {
  std::vector<torch::Tensor> tensors;
  for (const auto& v : values) tensors.push_back(torch::tensor(v, torch::kFloat).to(dtype));
  return toy_of(tensors);
}

// One backward pass in which parameter i gets exactly gradients[i]; undefined ones are not used.
inline void backward_with(const std::vector<torch::Tensor>& parameters, const std::vector<torch::Tensor>& gradients) {
  std::vector<torch::Tensor> roots, grads;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(parameters[i]);
    grads.push_back(gradients[i].to(parameters[i].scalar_type()));
  }
  if (!roots.empty()) torch::autograd::backward(roots, grads);
}
inline void backward_with(Toy& module, const std::vector<std::vector<float>>& gradients) {
  std::vector<torch::Tensor> grads;
  for (const auto& g : gradients) grads.push_back(g.empty() ? torch::Tensor() : torch::tensor(g, torch::kFloat));
  backward_with(module->tensors, grads);
}

// Seeded values over many binades, the same wherever they are asked for.
inline torch::Tensor random_values(int64_t seed, at::IntArrayRef sizes, torch::Dtype dtype = torch::kFloat) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  auto values = torch::randn(sizes, generator, torch::kDouble);
  auto exponents = torch::randint(-12, 12, sizes, generator, torch::kDouble);
  return (values * torch::exp2(exponents)).to(dtype);
}

// T(lo, hi) of docs/numerics.md, section 1, in fp32 (fp64 for fp64 leaves). Undefined leaves are absent.
inline torch::Tensor tree(const std::vector<torch::Tensor>& leaves, size_t lo, size_t hi) {
  if (hi - lo == 1) {
    if (!leaves[lo].defined()) return {};
    return leaves[lo].to(leaves[lo].scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
  }
  size_t p = 1;
  while (2 * p < hi - lo) p *= 2;
  const auto a = tree(leaves, lo, lo + p), b = tree(leaves, lo + p, hi);
  if (!a.defined()) return b;
  if (!b.defined()) return a;
  return a + b;
}
inline torch::Tensor tree(const std::vector<torch::Tensor>& leaves) { return tree(leaves, 0, leaves.size()); }

inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  const auto x = a.detach().clone(at::MemoryFormat::Contiguous), y = b.detach().clone(at::MemoryFormat::Contiguous);
  return x.scalar_type() == y.scalar_type() && x.numel() == y.numel() &&
         (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}
inline uint64_t digest(const std::vector<torch::Tensor>& tensors) {
  uint64_t hash = 14695981039346656037ull;
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.detach().clone(at::MemoryFormat::Contiguous);  // an operator: ZeRO-3 makes it whole
    const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
    for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  }
  return hash;
}

// The whole reduced gradient of parameter i, put together from all ranks' shards; undefined when it is undefined.
// Collective.
inline torch::Tensor whole_gradient(ShardedOptimizer& optimizer, size_t i) {
  optimizer.finish_reduction();
  std::vector<torch::Tensor> shards;
  for (auto& group : optimizer.param_groups())
    shards.insert(shards.end(), group.params().begin(), group.params().end());
  auto shard = shards.at(i).grad();
  const auto& process_group = optimizer.group();
  auto size = torch::tensor({shard.defined() ? shard.numel() : int64_t{-1}}, torch::kLong);
  auto sizes = torch::empty({process_group->getSize()}, torch::kLong);
  process_group->all_gather_single(sizes, size)->wait();
  const int64_t longest = sizes.max().item<int64_t>();
  if (longest < 0) return {};
  TORCH_CHECK(sizes.min().item<int64_t>() >= 0, "some shards of the parameter have a gradient, some not");
  if (optimizer.options().stage() == Stage::Replicated || process_group->getSize() == 1) return shard.detach().clone();
  auto padded = torch::zeros({longest}, shard.options().requires_grad(false));
  padded.narrow(0, 0, shard.numel()).copy_(shard.detach());
  auto all = torch::empty({longest * process_group->getSize()}, padded.options());
  process_group->all_gather_single(all, padded)->wait();
  std::vector<torch::Tensor> pieces;
  for (int r = 0; r < process_group->getSize(); ++r)
    pieces.push_back(all.narrow(0, r * longest, sizes[r].item<int64_t>()));
  return torch::cat(pieces);
}

inline const std::vector<Stage>& all_stages() {
  static const std::vector<Stage> stages{Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3};
  return stages;
}

}  // namespace trueshard::testing
