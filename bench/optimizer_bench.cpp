// SPDX-License-Identifier: BSD-3-Clause
// Unscale, clip, AdamW and the 16-bit copy over one rank's shard: this library's step against libtorch's sequence on
// the same tensors. The floor is the time of a plain copy of the bytes that the step must at least read and write.
// Usage: optimizer_bench [rounds] [elements]   prints one JSON line per row.
#include <torch/torch.h>

#include <cstring>

#include <trueshard/trueshard.h>

#include "bench/rank_processes.h"

namespace trueshard::bench {
namespace {

struct FlatImpl : torch::nn::Module {
  torch::Tensor weight;
  explicit FlatImpl(int64_t elements) { weight = register_parameter("weight", torch::ones({elements})); }
};

void run(const Store& store, int rounds, int64_t elements) {
  const auto group = init_process_group(store, 0, 1);
  FlatImpl ours(elements), theirs(elements);
  auto sharded = shard(ours, torch::optim::AdamW(ours.parameters()), group,
                       ShardOptions().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
  ShardedGradScaler scaler(group, GradScalerOptions().init_scale(8.0));
  torch::optim::AdamW plain(theirs.parameters());
  auto copy16 = torch::empty({elements}, torch::kBFloat16);
  auto gradient = torch::full({elements}, 8.0f), gradient16 = gradient.to(torch::kBFloat16);
  auto source = torch::ones({elements}), target = torch::empty({elements});
  std::vector<double> fused, sequence, memcpy_seconds;
  for (int round = 0; round < rounds + 1; ++round) {
    sharded->zero_grad();
    torch::autograd::backward({scaler.scale(ours.weight)}, {gradient16.to(torch::kFloat)});
    sharded->finish_reduction();
    double start = now();
    scaler.unscale_(*sharded);
    clip_grad_norm_(*sharded, 1.0);
    scaler.step(*sharded);
    const double a = now() - start;
    scaler.update();

    theirs.weight.mutable_grad() = gradient.clone();
    start = now();
    {
      torch::NoGradGuard no_grad;
      auto found = torch::zeros({1}), inverse = torch::full({1}, 0.125f);
      std::vector<torch::Tensor> gradients{theirs.weight.grad()};
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
      torch::nn::utils::clip_grad_norm_(theirs.parameters(), 1.0);
      if (found.item<float>() == 0) plain.step();
      copy16.copy_(theirs.weight);
    }
    const double b = now() - start;
    start = now();
    std::memcpy(target.data_ptr(), source.const_data_ptr(), static_cast<size_t>(elements) * 4);
    const double c = now() - start;
    if (round == 0) continue;
    fused.push_back(a);
    sequence.push_back(b);
    memcpy_seconds.push_back(c);
  }
  const double bandwidth = 8.0 * static_cast<double>(elements) / median(memcpy_seconds);
  const double floor =
      (4 * 4 + 3 * 4 + 2) * static_cast<double>(elements) / bandwidth;  // read g p m v; write p m v and the copy
  for (const auto& [row, samples] : {std::pair{"trueshard", &fused}, std::pair{"libtorch sequence", &sequence}}) {
    std::printf("{\"bench\": \"optimizer\", \"elements\": %lld, \"row\": \"%s\", \"ms\": %.3f, \"floor_ms\": %.3f}\n",
                static_cast<long long>(elements), row, 1e3 * median(*samples), 1e3 * floor);
  }
}

}  // namespace
}  // namespace trueshard::bench

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const int64_t elements = argc > 2 ? std::atoll(argv[2]) : 16'000'000;
  return trueshard::bench::run_ranks(
             1, [&](int, int, const trueshard::bench::Store& store) { trueshard::bench::run(store, rounds, elements); })
             ? 0
             : 1;
}
