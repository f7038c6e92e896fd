// SPDX-License-Identifier: BSD-3-Clause
// fp16 compute with fp32 masters and a grad scaler. In step 3 one rank's loss overflows: all ranks skip that step,
// halve the scale and go on.
#include <torch/torch.h>
#include <trueshard/trueshard.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  auto group = trueshard::init_process_group();
  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1));
  auto optimizer = trueshard::shard(*model, torch::optim::AdamW(model->parameters(), 1e-2), group,
                                    trueshard::ShardOptions()
                                        .stage(trueshard::Stage::Zero2)
                                        .mp_policy(trueshard::MixedPrecisionPolicy().param_dtype(torch::kHalf)));
  trueshard::ShardedGradScaler scaler(group, trueshard::GradScalerOptions().init_scale(1024.0).growth_interval(4));

  for (int64_t step = 0; step < 8; ++step) {
    torch::manual_seed(1000 * step + group->getRank());
    const auto input = torch::randn({16, 8}).to(torch::kHalf);  // libtorch has no hook that could cast inputs
    optimizer->zero_grad();
    auto loss = model->forward(input).to(torch::kFloat).square().mean();
    if (step == 3 && group->getRank() == 1) loss = loss * std::numeric_limits<float>::infinity();
    const double scale = scaler.get_scale();
    scaler.scale(loss).backward();
    scaler.unscale_(*optimizer);
    trueshard::clip_grad_norm_(*optimizer, 1.0);
    const bool taken = scaler.step(*optimizer);
    scaler.update();
    if (group->getRank() == 0)
      std::printf("step %ld  scale %4.0f  %s\n", step, scale, taken ? "taken" : "skipped on all ranks");
  }
  if (group->getRank() == 0)
    std::printf("scale at the end %.0f, skipped %ld\n", scaler.get_scale(), scaler.skipped_steps());
}
