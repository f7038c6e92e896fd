// SPDX-License-Identifier: BSD-3-Clause
// Ordinary programs that once gave a wrong number or could not go on: each stays right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TwoOptimizersOverOneModule, KeepTheirMasters) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}, {1.0f}});
    auto options = ShardOptions().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
    auto x = shard(*module, torch::optim::SGD({module->tensors[0]}, 1e-3), group, options);
    auto y = shard(*module, torch::optim::SGD({module->tensors[1]}, 1e-3), group, options);
    for (int step = 0; step < 100; ++step) {
      x->zero_grad();
      y->zero_grad();
      backward_with(module, {{1.0f}, {1.0f}});
      x->step();
      y->step();
    }
    EXPECT_NEAR(full_state_dict(*x)["p0"].item<float>(), 0.9f, 1e-5);
    EXPECT_NEAR(full_state_dict(*y)["p1"].item<float>(), 0.9f, 1e-5);
    EXPECT_THAT(error_of([&] { shard(*module, torch::optim::SGD({module->tensors[0]}, 1e-3), group, options); }),
                HasSubstr("belongs to another sharded optimizer already"));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Norm, BesideAnFp64ParameterThatNobodyUses) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy_of({torch::zeros({4}), torch::ones({3}, torch::kDouble)});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group);
    backward_with(module, {{3.0f, 3.0f, 3.0f, 3.0f}, {}});
    EXPECT_EQ(clip_grad_norm_(*optimizer, 1e9), 6.0);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Zeroing, ThroughTheModuleWhereRanksUseDifferentParameters) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{0.0f}, {0.0f}});
    auto optimizer =
        shard(*module, torch::optim::SGD(module->parameters(), 0.0), group, ShardOptions().gradient_divide_factor(1));
    for (int step = 0; step < 3; ++step) {
      module->zero_grad();
      backward_with(module, {rank == 0 ? std::vector<float>{1.0f} : std::vector<float>{}, {1.0f}});
      EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 1.0f);
      EXPECT_EQ(whole_gradient(*optimizer, 1).item<float>(), 3.0f);
      optimizer->step();
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Zeroing, OfOneGradientOnOneRankIsAnErrorOnAll) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}, {1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    backward_with(module, {{1.0f}, {1.0f}});
    if (rank == 1) module->tensors[0].mutable_grad() = torch::Tensor();
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("zeroed on some ranks only"));
    EXPECT_EQ(module->tensors[1].item<float>(), 1.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Scaler, SeesAnOverflowOfGradientsMadeAnewAfterUnscale) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    ShardedGradScaler scaler(group, GradScalerOptions().init_scale(1024.0));
    const auto backward = [&](float gradient) { scaler.scale((module->tensors[0] * gradient).sum()).backward(); };
    backward(1.0f);
    scaler.unscale_(*optimizer);
    optimizer->zero_grad();
    backward(std::numeric_limits<float>::infinity());
    EXPECT_FALSE(scaler.step(*optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 512.0);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Scaler, GoesWithEmptyPassesAndWithZeroingInPlace) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{3.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    ShardedGradScaler scaler(group);
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad(false);
      if (rank == 1) {
        optimizer->empty_pass();
      } else {
        scaler.scale((module->tensors[0] * 1.5f).sum()).backward();
      }
      EXPECT_TRUE(scaler.step(*optimizer));
      scaler.update();
    }
    EXPECT_EQ(module->tensors[0].item<float>(), 0.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(GradientsByHand, AreRefusedWhereTheyWouldBeLost) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    backward_with(module, {{1.0f}});
    module->tensors[0].mutable_grad() = torch::full({1}, 100.0f);
    EXPECT_THAT(error_of([&] { optimizer->step(); }), AllOf(HasSubstr("'p0'"), HasSubstr("was replaced")));
    optimizer->zero_grad();
    for (auto& p : optimizer->param_groups()[0].params()) p.mutable_grad() = torch::ones_like(p);
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("set by hand"));
    EXPECT_EQ(module->tensors[0].item<float>(), 1.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ParametersWritten, OnOneRankAfterTheReductionAreAnErrorBeforeAnyWeightMoves) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy_of({torch::zeros({48})});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    backward_with(module, {std::vector<float>(48, 1.0f)});
    clip_grad_norm_(*optimizer, 1e9);
    const auto before = module->tensors[0].detach().clone();
    if (rank == 1) {
      torch::NoGradGuard no_grad;
      module->tensors[0].add_(1.0f);
    }
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("changed outside the optimizer"));
    if (rank != 1) {
      EXPECT_TRUE(same_bits(module->tensors[0], before));
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ShardRefuses, APolicyThatOneRankMisspelt) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}});
    auto policy = MixedPrecisionPolicy().param_dtype(torch::kBFloat16);
    if (rank == 1) policy.full_precision_modules({"no_such"});
    EXPECT_THAT(error_of([&] {
                  shard(*module, torch::optim::SGD(module->parameters(), 1.0), group, ShardOptions().mp_policy(policy));
                }),
                AllOf(HasSubstr("rank 1:"), HasSubstr("'no_such'")));
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
