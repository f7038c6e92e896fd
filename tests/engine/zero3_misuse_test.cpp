// SPDX-License-Identifier: BSD-3-Clause
// ZeRO-3 in the hands of a user who does odd things: right, or an error that says what to do.
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

ShardOptions zero3(int64_t unit_bytes = 1, int64_t resident_bytes = 0) {
  return ShardOptions().stage(Stage::Zero3).unit_bytes(unit_bytes).resident_bytes(resident_bytes);
}
std::vector<ShardOptions> every_budget() {
  return {zero3(), ShardOptions().stage(Stage::Zero3), zero3(1 << 30, 1 << 30), zero3(64, 100)};
}
MixedPrecisionPolicy bf16() { return MixedPrecisionPolicy().param_dtype(torch::kBFloat16); }

std::unique_ptr<ShardedOptimizer> shard_sgd(Toy& module, const Group& group, const ShardOptions& options) {
  return shard(*module, torch::optim::SGD(module->parameters(), 0.5), group, options);
}
std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}
std::vector<torch::Tensor> values() {
  std::vector<torch::Tensor> all;
  for (int64_t i = 0; i < 3; ++i) all.push_back(random_values(i + 1, {37}));
  return all;
}
std::vector<torch::Tensor> ones(size_t count) { return std::vector<torch::Tensor>(count, torch::ones({37})); }

void swap_data(torch::Tensor& a, torch::Tensor& b) {
  const auto kept = a.data();
  a.set_data(b.data());
  b.set_data(kept);
}

std::string swapped(const Group& group, const ShardOptions& options, bool under_a_guard) {
  Toy module = toy_of(values());
  auto optimizer = shard_sgd(module, group, options);
  for (int round = 0; round < 3; ++round) {
    if (under_a_guard) {
      const FullParametersGuard whole(*optimizer);
      swap_data(module->tensors[0], module->tensors[1]);
      swap_data(module->tensors[1], module->tensors[2]);
    } else {
      swap_data(module->tensors[0], module->tensors[1]);
    }
    backward_with(module->tensors, ones(3));
    optimizer->step();
    optimizer->zero_grad();
  }
  std::vector<torch::Tensor> masters;
  for (const auto& item : full_state_dict(*optimizer)) masters.push_back(item.value());
  return std::to_string(digest(masters)) + ' ' + std::to_string(digest(module->tensors));
}

TEST(SetData, BetweenManagedParametersSwapsThem) {
  for (const bool mixed : {false, true}) {
    for (const bool under_a_guard : {false, true}) {
      const auto run = [&](ShardOptions options) {
        if (mixed) options.mp_policy(bf16());
        const auto results =
            run_threads(3, [&](int, const Group& group) { return swapped(group, options, under_a_guard); });
        EXPECT_TRUE(results.ok()) << results;
        return results[0].report;
      };
      // What the swaps come to, by hand.
      auto plain = values();
      for (int round = 0; round < 3; ++round) {
        std::swap(plain[0], plain[1]);
        if (under_a_guard) std::swap(plain[1], plain[2]);
        for (auto& value : plain) value = value - 0.5;
      }
      const auto expected = run(ShardOptions().stage(Stage::Replicated));
      if (!mixed) {
        EXPECT_EQ(expected, std::to_string(digest(plain)) + ' ' + std::to_string(digest(plain)));
      }
      for (const auto& options : every_budget()) EXPECT_EQ(run(options), expected) << mixed << under_a_guard;
      EXPECT_EQ(run(ShardOptions().stage(Stage::Zero2)), expected);
    }
  }
}

TEST(SetData, OfOneManagedParameterToAnotherCopiesTheValue) {
  const auto run = [](const ShardOptions& options) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy_of(values());
      auto optimizer = shard_sgd(module, group, options);
      for (int step = 0; step < 3; ++step) {
        if (step == 1) module->tensors[1].set_data(module->tensors[0].data());
        backward_with(module->tensors, ones(3));
        optimizer->step();
        optimizer->zero_grad();
      }
      return std::to_string(digest(module->tensors));
    });
    EXPECT_TRUE(results.ok()) << results;
    return results[0].report;
  };
  const auto expected = run(ShardOptions().stage(Stage::Replicated));
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const auto& options : every_budget()) EXPECT_EQ(run(options), expected);
  }
}

TEST(Storages, MayEndInsideAnOperator) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    for (const bool empty : {false, true}) {
      Toy module = toy_of({torch::ones({5})});
      shard_sgd(module, group, zero3()).reset();
      const torch::NoGradGuard no_grad;
      if (empty) {
        module->tensors[0].set_();
      } else {
        module->tensors[0].set_(torch::full({5}, 2.0f));
        EXPECT_EQ(module->tensors[0].sum().item<float>(), 10.0f);
      }
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Collectives, OnAShardedParameterAreRefusedAndTheGroupGoesOn) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    for (const auto& options : every_budget()) {
      Toy module = toy_of(values());
      auto optimizer = shard_sgd(module, group, options);
      std::vector<torch::Tensor> mine{module->tensors[0].detach()};
      const auto text = thrown([&] { group->allreduce(mine)->wait(); });
      EXPECT_NE(text.find("after it has returned"), std::string::npos) << text;
      EXPECT_NE(text.find("'p0'"), std::string::npos) << text;
      std::vector<torch::Tensor> copy{module->tensors[0].detach().clone()};
      group->allreduce(copy)->wait();
      EXPECT_TRUE(torch::allclose(copy[0], values()[0] * 3));
      const FullParametersGuard whole(*optimizer);
      group->allreduce(mine = {module->tensors[0].detach()})->wait();
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Writes, ThatFailOrChangeNothingAreNone) {
  for (const bool mixed : {false, true}) {
    const auto run = [&](ShardOptions options, bool write) {
      if (mixed) options.mp_policy(bf16());
      const auto results = run_threads(3, [&](int rank, const Group& group) {
        Toy module = toy_of(values());
        auto optimizer = shard_sgd(module, group, options);
        for (int step = 0; step < 2; ++step) {
          if (write && rank == 1) {
            EXPECT_THROW(module->tensors[0].add_(1), c10::Error);  // a leaf that requires a gradient
            const torch::NoGradGuard no_grad;
            EXPECT_THROW(module->tensors[1].add_(torch::ones({4})), c10::Error);
            module->tensors[2].data().copy_(module->tensors[2].clone());
          }
          backward_with(module->tensors, ones(3));
          optimizer->step();
          optimizer->zero_grad();
        }
        std::vector<torch::Tensor> masters;
        for (const auto& item : full_state_dict(*optimizer)) masters.push_back(item.value());
        return std::to_string(digest(masters));
      });
      EXPECT_TRUE(results.ok()) << results;
      return results[0].report;
    };
    const auto expected = run(ShardOptions().stage(Stage::Replicated), false);
    for (const auto& options : every_budget()) EXPECT_EQ(run(options, true), expected) << "mixed " << mixed;
  }
}

TEST(Views, FromInsideAGuardSayThatTheyEndedWithIt) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy_of(values());
    auto optimizer = shard_sgd(module, group, zero3().mp_policy(bf16()));
    torch::Tensor view;
    {
      const FullParametersGuard whole(*optimizer);
      view = module->tensors[0].detach();
      EXPECT_EQ(view.sum().item<float>(), values()[0].sum().item<float>());
    }
    const auto text = thrown([&] { (void)view.sum(); });
    EXPECT_NE(text.find("take the view anew"), std::string::npos) << text;
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Units, AreFoundByAnyNameOfTheirModule) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    struct Shared : torch::nn::Module {
      Shared() {
        torch::nn::Linear linear(3, 3);
        register_module("x", linear);
        register_module("y", linear);
      }
    };
    Shared module;
    auto optimizer = shard(module, torch::optim::SGD(module.parameters(), 0.5), group, zero3().units({"y"}));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// An operator of somebody else that uses parameters which are not among its arguments.
std::function<torch::Tensor(torch::Tensor)>& inside() {
  static thread_local std::function<torch::Tensor(torch::Tensor)> function;
  return function;
}
TORCH_LIBRARY(trueshard_misuse_test, library) {
  library.def("call(Tensor weight) -> Tensor", [](const torch::Tensor& weight) { return inside()(weight); });
}

TEST(OperatorsOfOthers, MayUseAnyParameter) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    for (const auto& options : every_budget()) {
      Toy module = toy_of(values());
      auto optimizer = shard_sgd(module, group, options);
      inside() = [&](const torch::Tensor& weight) { return (weight * module->tensors[1]).sum(); };
      const auto op = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("trueshard_misuse_test::call", "")
                          .typed<torch::Tensor(const torch::Tensor&)>();
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(op.call(module->tensors[0]).item<float>(), (values()[0] * values()[1]).sum().item<float>());
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
