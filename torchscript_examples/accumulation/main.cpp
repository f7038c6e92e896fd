// SPDX-License-Identifier: BSD-3-Clause
// Several backward passes a step, and clipping. Twelve leaves a step, whoever computes them: the weights do not depend
// on how ranks x passes make twelve. Deferring passes saves their exchange, and is another order of additions.
#include <torch/torch.h>
#include <trueshard/trueshard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdio>
#include <optional>

namespace {

constexpr int64_t kLeaves = 12;

// Trains on `group`; `deferred`: passes but the last are not synchronised.
torch::Tensor train(const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool deferred) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 32), torch::nn::GELU(), torch::nn::Linear(32, 4));
  auto optimizer = trueshard::shard(*model, torch::optim::AdamW(model->parameters(), 1e-2), group,
                                    trueshard::ShardOptions().gradient_divide_factor(kLeaves));
  for (int64_t step = 0; step < 5; ++step) {
    optimizer->zero_grad();
    for (int64_t leaf = group->getRank(); leaf < kLeaves; leaf += group->getSize()) {
      std::optional<trueshard::NoSyncGuard> later;
      if (deferred && leaf + group->getSize() < kLeaves) later.emplace(*optimizer);
      const auto input = torch::randn({4, 8}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + leaf)));
      model->forward(input).square().mean().backward();
    }
    trueshard::clip_grad_norm_(*optimizer, 0.05);  // one norm over all ranks' shards
    optimizer->step();
  }
  std::vector<torch::Tensor> flat;
  for (const auto& item : trueshard::full_state_dict(*optimizer)) flat.push_back(item.value().flatten());
  return torch::cat(flat);
}

}  // namespace

int main() {
  auto group = trueshard::init_process_group();
  auto alone = trueshard::init_process_group(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*world_size=*/1,
                                             trueshard::ProcessGroupOptions().group_name("alone"));
  const auto together = train(group, false), one_rank = train(alone, false), later = train(group, true);
  if (group->getRank() != 0) return 0;
  const bool same = torch::equal(together, one_rank);
  std::printf("%d ranks x %ld passes and 1 rank x %ld passes: %s bits\n", group->getSize(), kLeaves / group->getSize(),
              kLeaves, same ? "the same" : "DIFFERENT");
  std::printf("deferred passes: largest difference below 1e-4: %s\n",
              (later - together).abs().max().item<double>() < 1e-4 ? "yes" : "NO");
  return same ? 0 : 1;
}
