// SPDX-License-Identifier: BSD-3-Clause
// The smallest change to a libtorch loop. Lines marked (*) are the only ones that know of trueshard.
#include <torch/torch.h>
#include <trueshard/trueshard.h>  // (*)

#include <cstdio>

int main() {
  torch::manual_seed(0);
  auto group = trueshard::init_process_group();  // (*)
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto optimizer = trueshard::shard(*model, torch::optim::AdamW(model->parameters(), 1e-2), group,
                                    trueshard::ShardOptions().stage(trueshard::Stage::Zero3));  // (*)

  for (int64_t step = 0; step <= 200; ++step) {
    torch::manual_seed(1000 * step + group->getRank());  // (*) every rank its own batch
    const auto input = torch::randn({32, 8});
    const auto target = torch::sin(input.sum(1, /*keepdim=*/true));
    optimizer->zero_grad();
    auto loss = torch::mse_loss(model->forward(input), target);
    loss.backward();
    optimizer->step();
    if (group->getRank() == 0 && step % 100 == 0) std::printf("step %3ld  loss %.2f\n", step, loss.item<double>());
  }
}
