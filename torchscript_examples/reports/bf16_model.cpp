// SPDX-License-Identifier: BSD-3-Clause
// "FSDP requires larger LR than DeepSpeed": a model that was loaded in bf16, trained with a small learning rate: by
// libtorch's AdamW on the bf16 parameters, and by trueshard, which keeps fp32 masters unless asked not to.
// Usage: report_bf16_model [steps]. Exits non-zero when a promise is broken.
#include <cstdio>
#include <cstdlib>

#include "torchscript_examples/reports/report.h"

namespace {

using namespace reports;

constexpr int kRanks = 3;
constexpr int64_t kBatch = 32;  // per rank
constexpr int kPoints = 5;      // of a loss curve

struct Curve {
  std::vector<float> losses;  // over all tokens
  uint64_t weights = 0;       // digest of the weights that the module shows at the end
};
torch::optim::AdamW adamw(Net& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(2e-4).weight_decay(0.01));
}
// The checkpoint holds bf16 numbers, whatever dtype it is loaded in.
Net load(torch::Dtype dtype) {
  Net net;
  net->to(torch::kBFloat16);
  net->to(dtype);
  return net;
}
bool is_point(int step, int steps) { return step * (kPoints - 1) % steps < kPoints - 1; }

// An ordinary loop over the batches of the given ranks.
template <typename Optimizer>
Curve train(Net& net, Optimizer& optimizer, const std::vector<int>& ranks, int steps) {
  Curve curve;
  for (int step = 0; step <= steps; ++step) {
    if (is_point(step, steps)) curve.losses.push_back(loss_over_all_tokens(net));
    if (step == steps) break;
    std::vector<torch::Tensor> tokens;
    for (const int rank : ranks) tokens.push_back(batch(step, rank, kBatch));
    optimizer.zero_grad();
    loss_of(net, torch::cat(tokens)).backward();
    optimizer.step();
  }
  curve.weights = digest(flat(net->parameters()));
  return curve;
}
std::vector<int> all_ranks(int world) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank) ranks.push_back(rank);
  return ranks;
}

Curve plain(torch::Dtype dtype, int world, int steps) {
  Net net = load(dtype);
  auto optimizer = adamw(net);
  return train(net, optimizer, all_ranks(world), steps);
}
Curve sharded(torch::Dtype dtype, const trueshard::ShardOptions& options, int world, int steps) {
  std::vector<Curve> curves(static_cast<size_t>(world));
  run_ranks(world, [&](int rank, const Group& group) {
    Net net = load(dtype);
    auto optimizer = trueshard::shard(*net, adamw(net), group, options);
    curves[static_cast<size_t>(rank)] = train(net, *optimizer, {rank}, steps);
  });
  for (const auto& curve : curves) {
    TORCH_CHECK(curve.weights == curves[0].weights, "ranks ended with different weights");
  }
  return curves[0];
}

void print(const char* title, const Curve& curve) {
  std::printf("%-52s", title);
  for (const float loss : curve.losses) std::printf("  %7.4f", loss);
  std::printf("\n");
}
double learnt(const Curve& curve) { return curve.losses.front() - curve.losses.back(); }

int report(int steps) {
  using trueshard::ShardOptions;
  const auto policy = ShardOptions().mp_policy(trueshard::MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
  const auto low = ShardOptions().low_precision_master(true);
  const auto fp32 = plain(torch::kFloat, kRanks, steps);
  const auto bf16 = plain(torch::kBFloat16, kRanks, steps);
  const auto ours = sharded(torch::kBFloat16, {}, kRanks, steps);
  const auto ours_fp32_loaded = sharded(torch::kFloat, policy, kRanks, steps);
  const auto on_request = sharded(torch::kBFloat16, low, kRanks, steps);
  std::printf("Loss over %d steps of AdamW with learning rate 2e-4; all runs see the same data.\n\n%-52s", steps,
              "step");
  for (int step = 0; step <= steps; ++step) {
    if (is_point(step, steps)) std::printf("  %7d", step);
  }
  std::printf("\n");
  print("libtorch, loaded in fp32", fp32);
  print("libtorch, loaded in bf16", bf16);
  print("trueshard on 3 ranks, loaded in bf16", ours);
  print("trueshard on 3 ranks, loaded in fp32, bf16 policy", ours_fp32_loaded);
  print("trueshard on 3 ranks, low_precision_master(true)", on_request);

  const bool follows = std::abs(learnt(ours) - learnt(fp32)) <= 0.05 * learnt(fp32);
  const bool same_bits = ours.weights == ours_fp32_loaded.weights;
  const bool only_on_request =
      sharded(torch::kBFloat16, low, 1, steps).weights == plain(torch::kBFloat16, 1, steps).weights;
  std::printf(
      "\nIn bf16 an update below half a unit in the last place is lost: libtorch learns %.0f %% of what it "
      "learns in fp32.\ntrueshard steps fp32 masters whatever dtype the model was loaded in, and learns "
      "%.0f %%: %s.\n",
      100 * learnt(bf16) / learnt(fp32), 100 * learnt(ours) / learnt(fp32), follows ? "kept" : "BROKEN");
  std::printf("Loaded in bf16, or in fp32 and computed in bf16: the same bits: %s.\n", same_bits ? "kept" : "BROKEN");
  std::printf("16-bit weights are stepped only by explicit request, then with libtorch's bits (one rank): %s.\n",
              only_on_request ? "kept" : "BROKEN");
  return follows && same_bits && only_on_request ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return report(argc > 1 ? std::max(kPoints, std::atoi(argv[1])) : 600);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "report_bf16_model: %s\n", error.what());
    return 2;
  }
}
