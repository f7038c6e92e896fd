// SPDX-License-Identifier: BSD-3-Clause
// A whole training step of the example's GPT in every stage, over the compute floor: the same model in the same ranks
// with libtorch's AdamW and no communication at all. Rounds are interleaved; ratios are of medians. Usage: step_bench
// [rounds] [width]   prints one JSON line per row.
#include <torch/torch.h>

#include <map>
#include <memory>

#include <trueshard/trueshard.h>

#include "bench/rank_processes.h"
#include "torchscript_examples/gpt/gpt.h"

namespace trueshard::bench {
namespace {

struct Runner {
  std::string name;
  gpt::Gpt model;
  std::unique_ptr<torch::optim::AdamW> plain;
  std::unique_ptr<ShardedOptimizer> sharded;
  torch::Tensor tokens;

  void step() {
    auto logits = model->forward(tokens.narrow(1, 0, 64)).to(torch::kFloat);
    auto loss = torch::nn::functional::cross_entropy(logits.reshape({-1, 256}), tokens.narrow(1, 1, 64).reshape({-1}));
    if (sharded) {
      sharded->zero_grad();
      loss.backward();
      clip_grad_norm_(*sharded, 1.0);
      sharded->step();
    } else {
      plain->zero_grad();
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      plain->step();
    }
  }
};

std::unique_ptr<Runner> make(const std::string& name, const gpt::GptOptions& size, const Group& group, int stage,
                             bool bf16) {
  torch::manual_seed(0);
  auto runner = std::make_unique<Runner>(
      Runner{name, gpt::Gpt(size), nullptr, nullptr, torch::randint(0, 256, {4, 65}, torch::kLong)});
  auto optimizer = torch::optim::AdamW(runner->model->parameters(), torch::optim::AdamWOptions(1e-3));
  if (stage < 0) {
    if (bf16)
      runner->model->to(
          torch::kBFloat16);  // the optimizer holds the same tensors: 16-bit parameters, the cheapest there is
    runner->plain =
        std::make_unique<torch::optim::AdamW>(runner->model->parameters(), torch::optim::AdamWOptions(1e-3));
    return runner;
  }
  auto options = ShardOptions().stage(static_cast<Stage>(stage)).bucket_bytes(1 << 20);
  if (bf16) options.mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
  runner->sharded = shard(*runner->model, std::move(optimizer), group, options);
  return runner;
}

void run(int rank, int world, const Store& store, int rounds, int64_t width) {
  const auto group = init_process_group(store, rank, world);
  const auto size = gpt::GptOptions().width(width).layers(4).context(64);
  for (const bool bf16 : {false, true}) {
    std::vector<std::unique_ptr<Runner>> runners;
    runners.push_back(make("no communication", size, group, -1, bf16));
    runners.push_back(make("replicated", size, group, 0, bf16));
    runners.push_back(make("zero1", size, group, 1, bf16));
    runners.push_back(make("zero2", size, group, 2, bf16));
    runners.push_back(make("zero3", size, group, 3, bf16));
    std::map<std::string, std::vector<double>> seconds;
    for (int round = 0; round < rounds + 2; ++round) {
      for (auto& runner : runners) {
        const double sample = slowest(group, 2, [&] { runner->step(); });
        if (round > 1) seconds[runner->name].push_back(sample);
      }
    }
    if (rank != 0) continue;
    const double floor = median(seconds["no communication"]);
    int64_t elements = 0;
    for (const auto& p : runners[0]->model->parameters()) elements += p.numel();
    for (const auto& runner : runners) {
      std::printf(
          "{\"bench\": \"step\", \"ranks\": %d, \"elements\": %lld, \"dtype\": \"%s\", \"row\": \"%s\", \"ms\": %.3f, "
          "\"floor_ms\": %.3f, \"ratio\": %.3f}\n",
          world, static_cast<long long>(elements), bf16 ? "bf16" : "fp32", runner->name.c_str(),
          1e3 * median(seconds[runner->name]), 1e3 * floor, median(seconds[runner->name]) / floor);
    }
  }
  group->barrier()->wait();
}

}  // namespace
}  // namespace trueshard::bench

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  const int64_t width = argc > 2 ? std::atoll(argv[2]) : 192;
  bool ok = true;
  for (const int world : {2, 4}) {
    ok &= trueshard::bench::run_ranks(world, [&](int rank, int size, const trueshard::bench::Store& store) {
      trueshard::bench::run(rank, size, store, rounds, width);
    });
  }
  return ok ? 0 : 1;
}
