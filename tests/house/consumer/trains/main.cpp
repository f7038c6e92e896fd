// SPDX-License-Identifier: BSD-3-Clause
// Two steps on one rank, once with trueshard and once with libtorch alone, must end at the same bits.
#include <iostream>

#include <torch/torch.h>
#include <trueshard/trueshard.h>

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::GELU(), torch::nn::Linear(16, 4));
}

torch::Tensor loss_of(torch::nn::Sequential& model, int64_t step) {
  const auto input = torch::linspace(-1.0, 1.0, 32).view({4, 8}) * static_cast<double>(step + 1);
  return model->forward(input).square().mean();
}

void train(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer) {
  for (int64_t step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    loss_of(model, step).backward();
    optimizer.step();
  }
}

}  // namespace

int main() {
  const torch::optim::AdamWOptions options(1e-2);
  auto plain = make_model();
  torch::optim::AdamW plain_optimizer(plain->parameters(), options);
  train(plain, plain_optimizer);

  auto model = make_model();
  const auto group = trueshard::init_process_group();
  auto optimizer = trueshard::shard(*model, torch::optim::AdamW(model->parameters(), options), group);
  train(model, *optimizer);

  const auto initial = make_model()->parameters();
  const auto expected = plain->parameters();
  const auto got = model->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (torch::equal(expected[i], initial[i]) || !torch::equal(expected[i], got[i])) {
      std::cerr << "parameter " << i << " differs from the plain loop's, or did not move\n";
      return 1;
    }
  }
  std::cout << "trained " << optimizer->metrics().steps << " steps\n";
  return 0;
}
