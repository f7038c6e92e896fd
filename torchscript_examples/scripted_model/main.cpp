// SPDX-License-Identifier: BSD-3-Clause
// A TorchScript model from a file, trained in C++ with its parameters sharded. The file may come from torch.jit.script
// in Python; this program writes one itself first, so that it can run alone.
#include <torch/script.h>
#include <torch/torch.h>
#include <trueshard/trueshard.h>

#include <cstdio>
#include <string>

namespace {

void write_model(const std::string& file) {
  torch::manual_seed(1);
  torch::jit::Module model("Classifier");
  model.register_parameter("table", torch::randn({32, 16}) * 0.3, /*is_buffer=*/false);
  model.register_parameter("up", torch::randn({16, 48}) * 0.2, false);
  model.register_parameter("down", torch::randn({48, 16}) * 0.2, false);
  model.define(R"(
    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.embedding(self.table, tokens)
        x = x + torch.matmul(torch.gelu(torch.matmul(x, self.up)), self.down)
        return torch.matmul(x, self.table.t())
  )");
  for (auto parameter : model.parameters()) parameter.set_requires_grad(true);
  model.save(file);
}

// FNV-1a over the bytes of the weights: equal digests, equal bits.
uint64_t digest(trueshard::ShardedOptimizer& optimizer) {
  uint64_t hash = 1469598103934665603ull;
  for (const auto& item : trueshard::full_state_dict(optimizer)) {
    const auto bytes = item.value().contiguous();
    const auto* data = static_cast<const unsigned char*>(bytes.const_data_ptr());
    for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  }
  return hash;
}

uint64_t train(const std::string& file, const c10::intrusive_ptr<c10d::ProcessGroup>& group, trueshard::Stage stage) {
  torch::jit::Module model = torch::jit::load(file);
  model.train();
  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : model.parameters()) parameters.push_back(parameter);
  auto optimizer = trueshard::shard(model, torch::optim::SGD(parameters, torch::optim::SGDOptions(0.2).momentum(0.9)),
                                    group, trueshard::ShardOptions().stage(stage));
  double first = 0, last = 0;
  for (int64_t step = 0; step < 60; ++step) {
    torch::manual_seed(1000 * step + group->getRank());
    const auto tokens = torch::randint(0, 32, {64}, torch::kLong);
    optimizer->zero_grad();
    auto loss =
        torch::nn::functional::cross_entropy(model.forward({tokens}).toTensor(), (tokens * 5 + 3).remainder(32));
    loss.backward();
    optimizer->step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  if (group->getRank() == 0 && !(last < 0.5 * first)) std::printf("nothing was learnt: loss %f -> %f\n", first, last);
  return digest(*optimizer);
}

}  // namespace

int main(int argc, char** argv) {
  auto group = trueshard::init_process_group();
  const std::string file = argc > 1 ? argv[1] : "scripted_model." + std::to_string(group->getRank()) + ".pt";
  if (argc < 2) write_model(file);
  const auto replicated = train(file, group, trueshard::Stage::Replicated);
  const auto sharded = train(file, group, trueshard::Stage::Zero3);
  if (group->getRank() == 0)
    std::printf("replicated and ZeRO-3 end with %s bits\n", replicated == sharded ? "the same" : "DIFFERENT");
  return replicated == sharded ? 0 : 1;
}
