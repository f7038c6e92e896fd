// SPDX-License-Identifier: BSD-3-Clause
// Memory by formula (docs/design.md): bytes per parameter element between steps, for every stage, and what comes and
// goes within one.
#include <gtest/gtest.h>
#include <malloc.h>

#include <fstream>
#include <sstream>

#include "plugin/optim/session.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

struct Formula {  // bytes per element
  double parameters, masters, gradients, state;
};
// AdamW. W ranks; compute dtype of `c` bytes; fp32 masters. ZeRO-3: what is whole comes on top. `shared`: ranks of one
// host have one compute copy.
Formula formula(Stage stage, int world, int c, bool shared) {
  const double share = stage == Stage::Replicated ? 1.0 : 1.0 / world;
  if (stage == Stage::Zero3) return {0.0, 4.0 * share, 4.0 * share, 8.0 * share};
  return {shared ? c * share : c, c == 4 ? 0.0 : 4.0 * share, 4.0 * share, 8.0 * share};
}

// 300,000 elements in parameters whose padding is small beside them.
std::vector<torch::Tensor> model() {
  return {torch::ones({300, 400}), torch::ones({400}), torch::ones({400, 449}), torch::ones({2})};
}
constexpr double kElements = 300.0 * 400 + 400 + 400 * 449 + 2;

// Proportional set size: shared pages count once over all processes.
int64_t pss_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("Pss:", 0) == 0) return std::stoll(line.substr(4)) * 1024;
  }
  return -1;
}

// Pages that the fork left shared would count more and more as the others write to theirs: each takes its own now.
void unshare_heap() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("[heap]") == std::string::npos) continue;
    const auto begin = std::stoull(line, nullptr, 16), end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
    for (auto page = begin; page < end; page += 4096) {
      auto* byte = reinterpret_cast<volatile char*>(page);
      *byte = *byte;
    }
  }
}

struct BigImpl : torch::nn::Module {  // 8 M elements in 16 layers
  std::vector<torch::nn::Linear> layers;
  BigImpl() {
    for (int i = 0; i < 16; ++i)
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(torch::nn::LinearOptions(704, 704).bias(false))));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer->forward(x));
    return x.square().mean();
  }
};
TORCH_MODULE(Big);

struct Case {
  Stage stage;
  bool bf16;
  double whole;  // bytes per element of compute copies, all ranks together
};
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {Stage::Zero3, false, 0}, {Stage::Zero3, true, 0}, {Stage::Zero2, false, 0}, {Stage::Zero1, true, 2}};
  return all;
}
// Over all ranks, bytes per element: after shard(), forward, backward, the first step, the second step. The compute
// copy is one for the host; in fp32 it is the masters themselves.
std::vector<double> formula_by_phase(const Case& of) {
  return {4 + of.whole, 4 + of.whole, 8 + of.whole, 16 + of.whole, 16 + of.whole};
}

// What one rank grew by in each phase, less what comes on top of the formula; then the number of elements.
std::string measure(int rank, const Group& group, const Case& of) {
  const auto dtype = of.bf16 ? torch::kBFloat16 : torch::kFloat;
  {
    Big warm;
    warm->to(dtype);
    warm->forward(torch::ones({2, 704}, dtype)).backward();
  }
  unshare_heap();
  malloc_trim(0);
  group->barrier()->wait();
  const int64_t before = pss_bytes();
  if (before < 0) return "no PSS";
  torch::manual_seed(0);
  Big module;
  int64_t elements = 0;
  for (const auto& p : module->parameters()) elements += p.numel();
  auto options = ShardOptions().stage(of.stage).bucket_bytes(2 << 20).unit_bytes(2 << 20);
  if (of.bf16) options.mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
  auto optimizer = shard(*module, torch::optim::AdamW(module->parameters()), group, options);
  std::ostringstream report;
  const auto note = [&] {
    malloc_trim(0);
    group->barrier()->wait();
    const auto memory = optimizer->metrics().memory;
    report << pss_bytes() - before - memory.exchange - (of.stage == Stage::Zero3 ? memory.parameters : 0) << ' ';
    group->barrier()->wait();
  };
  note();
  for (int step = 0; step < 2; ++step) {
    auto loss = module->forward(torch::ones({2, 704}, dtype) * (rank + 1));
    if (step == 0) note();
    loss.backward();
    loss.reset();
    if (step == 0) {
      optimizer->finish_reduction();
      note();
    }
    optimizer->step();
    optimizer->zero_grad();
    note();
  }
  report << elements;
  return report.str();
}

// Measured, not counted; what libtorch itself allocates on its first steps is made before. First in the file: processes
// are forked before threads run.
TEST(MeasuredMemory, IsTheFormulaOverAllProcessesInEveryPhase) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer's own memory is many times the program's";
#endif
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory";
#endif
  constexpr double kMiB = 1 << 20;
  for (const auto& of : cases()) {
    const auto results = run_processes(4, [&](int rank, const Group& group) { return measure(rank, group, of); });
    ASSERT_TRUE(results.ok()) << results;
    if (results[0].report == "no PSS") GTEST_SKIP() << "this kernel has no /proc/self/smaps_rollup";
    const auto formula = formula_by_phase(of);
    std::vector<double> grown(formula.size(), 0.0);
    double elements = 0;
    for (const auto& result : results) {
      std::istringstream report(result.report);
      for (auto& sum : grown) {
        double value = 0;
        report >> value;
        sum += value;
      }
      report >> elements;
    }
    for (size_t phase = 0; phase < formula.size(); ++phase) {
      const double expected = formula[phase] * elements;
      EXPECT_LE(grown[phase], 1.03 * expected + 4 * 2 * kMiB)
          << "stage " << static_cast<int>(of.stage) << " bf16 " << of.bf16 << " phase " << phase << ", formula "
          << expected;
      EXPECT_GE(grown[phase], 0.9 * expected)
          << "stage " << static_cast<int>(of.stage) << " bf16 " << of.bf16 << " phase " << phase;
    }
  }
}

TEST(MemoryBetweenSteps, IsTheFormulaInEveryStage) {
  for (const auto stage : all_stages()) {
    for (const bool bf16 : {false, true}) {
      for (const auto& [world, shared] : {std::pair(1, true), {3, false}, {3, true}, {4, true}}) {
        const auto results = run_threads(world, [&, world = world, shared = shared](int, const Group& group) {
          Toy module = toy_of(model());
          auto options = ShardOptions().stage(stage).bucket_bytes(100000).resident_bytes(0).share_parameters(shared);
          if (bf16) options.mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
          auto optimizer = shard(*module, torch::optim::AdamW(module->parameters()), group, options);
          for (int step = 0; step < 2; ++step) {
            optimizer->zero_grad();
            for (int pass = 0; pass < 3; ++pass) {
              std::vector<torch::Tensor> gradients;
              for (const auto& p : module->parameters()) gradients.push_back(torch::ones_like(p));
              backward_with(module->parameters(), gradients);
            }
            clip_grad_norm_(*optimizer, 1.0);
            optimizer->step();
          }
          const auto memory = optimizer->metrics().memory;
          const auto expected = formula(stage, world, bf16 ? 2 : 4, shared);
          // Slack: parameters start at multiples of 64 elements, buckets are multiples of 16 * world.
          const double slack = 4 * 2 * (64.0 + 16 * world) * 8 / kElements;
          EXPECT_NEAR(static_cast<double>(memory.parameters) / kElements, expected.parameters, slack);
          EXPECT_NEAR(static_cast<double>(memory.masters) / kElements, expected.masters, slack);
          EXPECT_NEAR(static_cast<double>(memory.gradients) / kElements, expected.gradients, slack);
          // State is exact on the average over ranks, and this rank's share otherwise.
          EXPECT_NEAR(static_cast<double>(memory.optimizer_state) / kElements, expected.state, slack);
          EXPECT_EQ(memory.partial_sums, 0);
          EXPECT_EQ(memory.deferred, 0);
        });
        ASSERT_TRUE(results.ok()) << results;
      }
    }
  }
}

// After m of A passes: 4/W bytes for each partial sum beyond one, popcount(m * W) in all.
TEST(MemoryWithinAStep, PartialSumsFollowTheBinaryCounter) {
  for (const int world : {1, 3, 4}) {
    const auto results = run_threads(world, [&](int, const Group& group) {
      Toy module = toy_of(model());
      auto optimizer = shard(*module, torch::optim::AdamW(module->parameters()), group);
      std::vector<torch::Tensor> gradients;
      for (const auto& p : module->parameters()) gradients.push_back(torch::ones_like(p));
      for (int pass = 1; pass <= 7; ++pass) {
        backward_with(module->parameters(), gradients);
        const auto memory = optimizer->metrics().memory;
        const int partials = std::popcount(static_cast<unsigned>(pass * world));
        EXPECT_NEAR(static_cast<double>(memory.partial_sums) / kElements, 4.0 * (partials - 1) / world, 0.05) << pass;
      }
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(MemoryWithinAStep, DeferredGradientsCostFourBytesPerElement) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy_of(model());
    auto optimizer = shard(*module, torch::optim::AdamW(module->parameters()), group,
                           ShardOptions().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
    std::vector<torch::Tensor> gradients;
    for (const auto& p : module->parameters()) gradients.push_back(torch::ones_like(p));
    {
      NoSyncGuard later(*optimizer);
      backward_with(module->parameters(), gradients);
      backward_with(module->parameters(), gradients);
    }
    EXPECT_NEAR(static_cast<double>(optimizer->metrics().memory.deferred) / kElements, 4.0, 0.01);
    backward_with(module->parameters(), gradients);
    EXPECT_EQ(optimizer->metrics().memory.deferred, 0);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// ZeRO-2 holds a few buckets of gradients on their way, replicated and ZeRO-1 one pass of them; all free each gradient.
TEST(MemoryWithinAStep, GradientsOnTheirWay) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      std::vector<torch::Tensor> values;
      for (int i = 0; i < 16; ++i) values.push_back(torch::ones({4096}));
      Toy module(values);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group,
                             ShardOptions().stage(stage).bucket_bytes(4096 * 4));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        std::vector<torch::Tensor> gradients;
        for (const auto& p : module->parameters()) gradients.push_back(torch::ones_like(p));
        backward_with(module->parameters(), gradients);
        optimizer->step();
      }
      const double buckets = static_cast<double>(optimizer->metrics().memory.exchange) / (4096 * 4);
      if (stage >= Stage::Zero2) {
        EXPECT_LE(buckets, 3.0);
      } else {
        EXPECT_NEAR(buckets, 16.0, 0.01);
      }
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

}  // namespace
}  // namespace trueshard::testing
