// SPDX-License-Identifier: BSD-3-Clause
// A generator and a discriminator, each with its optimizer and its stage, on one process group. The generator's
// backward runs through the discriminator; what it leaves there is zeroed, as in any GAN loop.
#include <torch/torch.h>
#include <trueshard/trueshard.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  auto group = trueshard::init_process_group();
  torch::nn::Sequential generator(torch::nn::Linear(4, 64), torch::nn::LeakyReLU(), torch::nn::Linear(64, 2));
  torch::nn::Sequential discriminator(torch::nn::Linear(2, 64), torch::nn::LeakyReLU(), torch::nn::Linear(64, 1));
  const auto adam = [](torch::nn::Sequential& model, double lr) {
    return torch::optim::Adam(model->parameters(), torch::optim::AdamOptions(lr).betas({0.5, 0.999}));
  };
  auto of_generator = trueshard::shard(*generator, adam(generator, 2e-3), group,
                                       trueshard::ShardOptions().stage(trueshard::Stage::Zero1));
  auto of_discriminator = trueshard::shard(*discriminator, adam(discriminator, 2e-3), group,
                                           trueshard::ShardOptions().stage(trueshard::Stage::Zero3));

  const auto loss = [](const torch::Tensor& logits, bool real) {
    return torch::binary_cross_entropy_with_logits(logits, real ? torch::ones_like(logits) : torch::zeros_like(logits));
  };
  for (int64_t step = 0; step < 600; ++step) {
    torch::manual_seed(1000 * step + group->getRank());
    const auto angle = torch::rand({64, 1}) * 6.2831853;
    const auto real = torch::cat({torch::cos(angle), torch::sin(angle)}, 1);  // points on the unit circle
    const auto fake = generator->forward(torch::randn({64, 4}));

    of_discriminator->zero_grad();
    (loss(discriminator->forward(real), true) + loss(discriminator->forward(fake.detach()), false)).backward();
    of_discriminator->step();

    of_generator->zero_grad();
    loss(discriminator->forward(fake), true).backward();
    of_generator->step();
    of_discriminator->zero_grad();
  }

  torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  const double radius = generator->forward(torch::randn({512, 4})).norm(2, 1).mean().item<double>();
  if (group->getRank() == 0)
    std::printf("mean radius of generated points is within 0.3 of 1: %s\n", std::abs(radius - 1) < 0.3 ? "yes" : "NO");
}
