// SPDX-License-Identifier: BSD-3-Clause
// One compute copy for all ranks of a host (ShardOptions::share_parameters): what each rank sees, and what becomes of
// writes that go past autograd's versions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<Stage>& shared_stages() {
  static const std::vector<Stage> stages = {Stage::Zero1, Stage::Zero2};
  return stages;
}
Toy two_parameters() { return toy_of({torch::arange(3000, torch::kFloat) / 1000, torch::ones({5000})}); }

ShardOptions options_of(Stage stage, bool bf16, bool share = true) {
  auto options = ShardOptions().stage(stage).share_parameters(share);
  if (bf16) options.mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
  return options;
}
void backward(const Toy& module, int rank) {
  std::vector<torch::Tensor> gradients;
  for (const auto& p : module->parameters()) gradients.push_back(torch::full_like(p, rank + 1));
  backward_with(module->parameters(), gradients);
}
std::vector<torch::Tensor> masters_of(ShardedOptimizer& optimizer) {
  std::vector<torch::Tensor> masters;
  for (const auto& item : full_state_dict(optimizer)) masters.push_back(item.value());
  return masters;
}
void expect_one_report(const RankResults& results) {
  for (const auto& result : results) EXPECT_EQ(result.report, results[0].report);
}
std::string bits(const Toy& module) { return std::to_string(digest(module->parameters())); }

// Writes to the same places on all ranks, past the version counter, and what the steps after them make of it.
std::string with_raw_writes(int rank, const Group& group, const ShardOptions& options) {
  auto module = two_parameters();
  auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options);
  std::string all;
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    const torch::NoGradGuard no_grad;
    module->tensors[0].variable_data().clamp_(-0.5, 1.5 - step);  // as WGAN does: another version counter
    auto* raw = static_cast<std::byte*>(module->tensors[1].data_ptr());
    const auto value = torch::full({1}, 4 + step, module->tensors[1].options());
    std::memcpy(raw + 17 * value.nbytes(), value.const_data_ptr(), value.nbytes());
    all += bits(module) + ' ';
    {
      const torch::AutoGradMode with_grad(true);
      backward(module, rank);
    }
    optimizer->step();
    all += bits(module) + ' ';
  }
  return all;
}

TEST(SharedParameters, WritesPastTheVersionCounterAreTakenOver) {
  for (const bool bf16 : {false, true}) {
    for (const auto stage : shared_stages()) {
      const auto results = run_threads(
          3, [&](int rank, const Group& group) { return with_raw_writes(rank, group, options_of(stage, bf16)); });
      ASSERT_TRUE(results.ok()) << results;
      const auto alone = run_threads(3, [&](int rank, const Group& group) {
        return with_raw_writes(rank, group, options_of(Stage::Replicated, bf16));
      });
      for (const auto& result : results) {
        EXPECT_EQ(result.report, results[0].report);
        if (bf16) continue;  // there, a master that nothing else changed stays as it was
        EXPECT_EQ(result.report, alone[0].report) << "replicated, where memory is the rank's own";
      }
    }
  }
}

TEST(SharedParameters, AWriteOnOneRankStaysThereAndIsAnErrorAtTheStep) {
  for (const bool bf16 : {false, true}) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      auto module = two_parameters();
      auto optimizer =
          shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(Stage::Zero2, bf16));
      const auto before = bits(module);
      backward(module, rank);
      if (rank == 1) {
        const torch::NoGradGuard no_grad;
        module->tensors[1].variable_data().mul_(2);
      }
      group->barrier()->wait();
      EXPECT_EQ(bits(module) == before, rank != 1);
      std::string text;
      try {
        optimizer->step();
      } catch (const std::exception& error) {
        text = error.what();
      }
      EXPECT_THAT(text, HasSubstr("rank 1"));
      EXPECT_EQ(bits(module) == before, rank != 1) << "nothing was stepped";
      return std::string();
    });
    EXPECT_TRUE(results.ok()) << results;
  }
}

// A write that was taken over must not hide the next one that bumps no version.
TEST(SharedParameters, EachOfSeveralWritesIsTakenOver) {
  std::string expected;
  for (const auto stage : {Stage::Zero1, Stage::Zero2, Stage::Zero3}) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      auto module = two_parameters();
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(stage, true));
      std::string all;
      for (const bool guard : {false, true}) {
        const torch::NoGradGuard no_grad;
        optimizer->zero_grad();
        {
          const torch::AutoGradMode with_grad(true);
          backward(module, rank);
        }
        if (guard) {
          const FullParametersGuard whole(*optimizer);
          module->tensors[0].fill_(0.5);
        } else {
          module->tensors[0].fill_(0.5);
        }
        clip_grad_norm_(*optimizer, 1e9);  // where the write above is taken over
        module->tensors[0].detach().variable_data().fill_(0.25);
        optimizer->step();
        const auto masters = masters_of(*optimizer);
        EXPECT_TRUE(same_bits(masters[0], torch::zeros_like(masters[0])));  // 0.25 - 0.125 * 2
        all += bits(module) + ' ' + std::to_string(digest(masters)) + ' ';
      }
      return all;
    });
    ASSERT_TRUE(results.ok()) << results;
    expect_one_report(results);
    if (expected.empty()) expected = results[0].report;
    EXPECT_EQ(results[0].report, expected) << "stage " << static_cast<int>(stage);
  }
}

// A write of what is there already, and one of a few elements, leave the other masters as exact as they are.
TEST(SharedParameters, WritesThatChangeNothingChangeNoMaster) {
  std::string expected;
  for (const auto stage : all_stages()) {
    for (const bool share : {false, true}) {
      const auto results = run_threads(3, [&](int rank, const Group& group) {
        auto module = two_parameters();
        auto optimizer =
            shard(*module, torch::optim::SGD(module->parameters(), 0.001), group, options_of(stage, true, share));
        for (int step = 0; step < 4; ++step) {
          const torch::NoGradGuard no_grad;
          optimizer->zero_grad();
          module->tensors[0].clamp_(-10, 10);
          module->tensors[1][3].fill_(step);
          const torch::AutoGradMode with_grad(true);
          backward(module, rank);
          optimizer->step();
        }
        const auto masters = masters_of(*optimizer);
        EXPECT_FALSE(same_bits(masters[1], masters[1].to(torch::kBFloat16).to(torch::kFloat)));
        return bits(module) + ' ' + std::to_string(digest(masters));
      });
      ASSERT_TRUE(results.ok()) << results;
      expect_one_report(results);
      if (expected.empty()) expected = results[0].report;
      EXPECT_EQ(results[0].report, expected) << "stage " << static_cast<int>(stage) << " share " << share;
    }
  }
}

TEST(SharedParameters, MayBeEmpty) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy_of({torch::empty({0}), torch::empty({0, 4})});
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(stage, false));
      backward_with(module->parameters(), {torch::empty({0}), torch::empty({0, 4})});
      optimizer->step();
    });
    EXPECT_TRUE(results.ok()) << results;
  }
}

// What a process gives up after shard() does not matter: descriptors, unlocked memory.
TEST(SharedParameters, NeedNeitherDescriptorsNorUnlockedMemoryLater) {
  for (const auto stage : {Stage::Zero2, Stage::Zero3}) {
    const auto results = run_processes(3, [&](int rank, const Group& group) {
      auto module = two_parameters();
      auto first = two_parameters();  // what a process needs once
      shard(*first, torch::optim::SGD(first->parameters(), 0.125), group, options_of(stage, false));
      const int before = ::dup(0);
      ::close(before);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(stage, false));
      const int after = ::dup(0);
      ::close(after);
      EXPECT_EQ(after, before) << "shard() keeps a descriptor";
      rlimit limit{};
      ::getrlimit(RLIMIT_NOFILE, &limit);
      const rlimit none{3, limit.rlim_max};
      EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
      const torch::NoGradGuard no_grad;
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        module->tensors[0].fill_(step);
        if (stage == Stage::Zero2) {
          EXPECT_EQ(::mlock(module->tensors[0].data_ptr(), module->tensors[0].nbytes()), 0);
        }
        const torch::AutoGradMode with_grad(true);
        backward(module, rank);
        optimizer->step();
        EXPECT_TRUE(same_bits(module->tensors[0], torch::full_like(module->tensors[0], step - 0.25)))
            << module->tensors[0][0] << step << " stage " << static_cast<int>(stage);
      }
      EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
      return bits(module);
    });
    ASSERT_TRUE(results.ok()) << results;
    expect_one_report(results);
  }
}

// A child that trains would write to its parent's gradients.
TEST(SharedParameters, AForkedChildMayReadAndWriteButNotTrain) {
  const auto results = run_processes(3, [&](int rank, const Group& group) {
    auto module = two_parameters();
    auto optimizer =
        shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(Stage::Zero2, false));
    const auto before = bits(module);
    const pid_t child = ::fork();
    if (child == 0) {
      const auto refused = [](const std::function<void()>& call) {
        try {
          call();
        } catch (const std::exception& error) {
          return std::string(error.what()).find("was forked from the one that made the group") != std::string::npos;
        }
        return false;
      };
      bool right = refused([&] { backward(module, rank); }) && refused([&] { optimizer->step(); }) &&
                   refused([&] { optimizer->zero_grad(); });
      const torch::NoGradGuard no_grad;
      for (auto& p : module->tensors) p.fill_(100);
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(bits(module), before);
    backward(module, rank);
    optimizer->step();
    return bits(module);
  });
  ASSERT_TRUE(results.ok()) << results;
  expect_one_report(results);
}

// The others have clipped and step; this rank still looks at its parameters.
TEST(SharedParameters, DoNotMoveBeforeTheRanksOwnStep) {
  const auto results = run_processes(3, [&](int rank, const Group& group) {
    auto module = two_parameters();
    auto optimizer =
        shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(Stage::Zero2, true));
    for (int step = 0; step < 20; ++step) {
      optimizer->zero_grad();
      backward(module, rank);
      clip_grad_norm_(*optimizer, 1.0);
      const auto before = bits(module);
      if (rank == step % 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(bits(module), before);
      optimizer->step();
      EXPECT_NE(bits(module), before);
    }
    return bits(module);
  });
  ASSERT_TRUE(results.ok()) << results;
  expect_one_report(results);
}

TEST(SharedParameters, AreWholeAsSoonAsAGuardIsLeft) {
  for (const bool bf16 : {false, true}) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      auto module = two_parameters();
      auto optimizer =
          shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(Stage::Zero2, bf16));
      const torch::NoGradGuard no_grad;
      {
        const FullParametersGuard whole(*optimizer);
        for (auto& p : module->tensors) p.fill_(0.3);
      }
      // Nobody has met since, and what is seen is what was written, rounded to the compute dtype.
      for (const auto& p : module->tensors) {
        EXPECT_TRUE(same_bits(p, torch::full_like(p, 0.3)));
      }
      group->barrier()->wait();
      {
        const torch::AutoGradMode with_grad(true);
        backward(module, rank);
      }
      optimizer->step();
      for (const auto& item : full_state_dict(*optimizer)) {
        // The mean of 1, 2 and 3 times 0.125 away from 0.3 in fp32, not from 0.3 in bf16.
        EXPECT_TRUE(same_bits(item.value(), torch::full_like(item.value(), 0.3) - 0.25)) << item.key();
      }
      return bits(module);
    });
    ASSERT_TRUE(results.ok()) << results;
    expect_one_report(results);
  }
}

// One rank loads, a guard spreads: every stage gives the same masters, shared or not.
TEST(SharedParameters, AGuardSpreadsWhatOneRankWrote) {
  std::string expected;
  for (const auto stage : {Stage::Zero1, Stage::Zero2, Stage::Zero3}) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      auto module = two_parameters();
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(stage, true));
      if (rank == 1) {
        const torch::NoGradGuard no_grad;
        for (auto& p : module->tensors) p.mul_(0.7);
      }
      {
        FullParametersGuard whole(*optimizer);
        whole.broadcast(1);
      }
      backward(module, rank);
      optimizer->step();
      const auto masters = masters_of(*optimizer);
      return bits(module) + ' ' + std::to_string(digest(masters));
    });
    ASSERT_TRUE(results.ok()) << results;
    expect_one_report(results);
    if (expected.empty()) expected = results[0].report;
    EXPECT_EQ(results[0].report, expected) << "stage " << static_cast<int>(stage);
  }
}

// A module outlives its optimizer and its group with memory of its own.
TEST(SharedParameters, AreTheModulesOwnAfterTheOptimizer) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    auto module = two_parameters();
    std::string before;
    {
      auto optimizer =
          shard(*module, torch::optim::SGD(module->parameters(), 0.125), group, options_of(Stage::Zero2, false));
      backward(module, rank);
      optimizer->step();
      before = bits(module);
    }
    EXPECT_EQ(bits(module), before);
    const torch::NoGradGuard no_grad;
    module->tensors[0].fill_(rank);
    group->barrier()->wait();
    EXPECT_TRUE(same_bits(module->tensors[0], torch::full_like(module->tensors[0], rank)));
    return std::string();
  });
  EXPECT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
