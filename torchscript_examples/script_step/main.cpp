// SPDX-License-Identifier: BSD-3-Clause
// A training loop whose step is TorchScript (step.py): the program only makes the group and feeds batches. It trains,
// saves the module half-way (the scaler's state goes with it), goes on from the file, and compares with the run that
// was not interrupted.
//   torchrun --nproc-per-node 3 --no-python script_step STEP.pt
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>
#include <trueshard/trueshard.h>

namespace {

constexpr int64_t kSteps = 24;

struct Rank {
  int64_t rank, world;
};

double train(torch::jit::Module& module, const Rank& place, int64_t begin, int64_t end) {
  double loss = 0;
  for (int64_t step = begin; step < end; ++step) {
    torch::manual_seed(1000 * step + place.rank);  // this rank's batch
    const auto x = torch::randn({8, 16});
    const auto y = x.sum(1, /*keepdim=*/true);
    loss = module.forward({x, y, place.rank, place.world}).toTensor().item<double>();
  }
  return loss;
}

torch::jit::Module saved_and_loaded(const torch::jit::Module& module) {
  std::stringstream file;
  module.save(file);
  return torch::jit::load(file);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "usage: script_step STEP.pt\n", 2;
  torch::jit::setGraphExecutorOptimize(false);  // its first runs, before it has profiled, would have other last bits
  auto group = trueshard::init_process_group(trueshard::ProcessGroupOptions().group_name("training"));
  const Rank place{group->getRank(), group->getSize()};

  torch::jit::Module whole = torch::jit::load(argv[1]), halves = torch::jit::load(argv[1]);
  const double first = train(whole, place, 0, 1);
  const double loss = train(whole, place, 1, kSteps);
  train(halves, place, 0, kSteps / 2);
  halves = saved_and_loaded(halves);
  train(halves, place, kSteps / 2, kSteps);

  bool same = true;
  auto other = halves.parameters().begin();
  for (const torch::Tensor& parameter : whole.parameters()) {
    same = same && torch::equal(parameter, *other);
    ++other;
  }
  const auto numbers = whole.run_method("scaler_numbers").toDoubleVector();
  if (place.rank != 0) return same ? EXIT_SUCCESS : EXIT_FAILURE;
  std::cout << "skipped steps: " << numbers[2] << "\n"
            << "scale went down: " << std::boolalpha << (numbers[0] < std::ldexp(1.0, 125)) << "\n"
            << "loss went down: " << (loss < first) << "\n"
            << "interrupted and uninterrupted run agree: " << same << std::endl;
  return same ? EXIT_SUCCESS : EXIT_FAILURE;
}
