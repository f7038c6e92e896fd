// SPDX-License-Identifier: BSD-3-Clause
// The sharded grad scaler (docs/numerics.md, section 4). Field cases 13 to 16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
constexpr float kInf = std::numeric_limits<float>::infinity();

// loss whose gradient is `gradient` before scaling
torch::Tensor loss_with(const torch::Tensor& parameter, const torch::Tensor& gradient) {
  return (parameter * gradient).sum();
}

// Field case 13: one decision for the whole group; ranks with empty shards join.
TEST(FieldCase13, StepOrSkipIsOneDecision) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(4, [&](int rank, const Group& group) {
      Toy module = toy_of({torch::zeros({48})});  // three rows: rank 3's shard is empty
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group, ShardOptions().stage(stage));
      ShardedGradScaler scaler(group, GradScalerOptions().init_scale(2.0).backoff_factor(0.5));
      auto gradient = torch::ones({48});
      gradient[20] = kInf;  // in rank 1's shard
      if (rank != 2) gradient[20] = 1.0f;
      scaler.scale(loss_with(module->tensors[0], gradient)).backward();
      EXPECT_FALSE(scaler.step(*optimizer));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 1.0);
      EXPECT_EQ(scaler.growth_tracker(), 0);
      EXPECT_EQ(scaler.skipped_steps(), 1);
      EXPECT_TRUE(module->tensors[0].eq(0.0f).all().item<bool>());
      optimizer->zero_grad();
      scaler.scale(loss_with(module->tensors[0], torch::ones({48}))).backward();
      EXPECT_TRUE(scaler.step(*optimizer));
      scaler.update();
      EXPECT_TRUE(module->tensors[0].eq(-1.0f).all().item<bool>());
      EXPECT_EQ(scaler.growth_tracker(), 1);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

// Field case 14: divided exactly once, whichever way the step goes.
TEST(FieldCase14, EveryWayDividesOnce) {
  for (const auto stage : all_stages()) {
    for (const bool flag : {false, true}) {
      const auto results = run_threads(3, [&](int, const Group& group) {
        const auto run = [&](double limit, bool unscale, bool adagrad) {
          Toy module = toy({{1.0f}});
          auto options = ShardOptions().stage(stage);
          // Adagrad has no fused step: the factors are applied before libtorch's own.
          auto optimizer = adagrad ? shard(*module, torch::optim::Adagrad(module->parameters(), 1.0), group, options)
                                   : shard(*module, torch::optim::SGD(module->parameters(), 1.0), group, options);
          ShardedGradScaler scaler(group, GradScalerOptions().init_scale(1024.0));
          scaler.scale(loss_with(module->tensors[0], torch::full({1}, flag ? kInf : 0.5f))).backward();
          if (unscale) scaler.unscale_(*optimizer);
          if (limit > 0) clip_grad_norm_(*optimizer, limit);
          EXPECT_EQ(scaler.step(*optimizer), !flag);
          scaler.update();
          return module->tensors[0].item<float>();
        };
        if (flag) {
          for (const double limit : {0.0, 1e9, 0.25}) EXPECT_EQ(run(limit, true, false), 1.0f);
          EXPECT_EQ(run(0, false, false), 1.0f);
          EXPECT_EQ(run(0, false, true), 1.0f);
          return;
        }
        EXPECT_EQ(run(0, false, false), 0.5f);
        EXPECT_EQ(run(0, true, false), 0.5f);
        EXPECT_EQ(run(1e9, true, false), 0.5f);
        EXPECT_NEAR(run(0.25, true, false), 0.75f, 1e-6);  // the 1e-6 in the factor
        EXPECT_NEAR(run(0, true, true), 0.0f, 1e-6);
        EXPECT_EQ(run(0, false, true), run(1e9, true, true));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}
TEST(FieldCase14, ASecondUnscaleThrowsAndAltersNothing) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    ShardedGradScaler scaler(group, GradScalerOptions().init_scale(1024.0));
    scaler.scale(loss_with(module->tensors[0], torch::full({1}, 0.5f))).backward();
    scaler.unscale_(*optimizer);
    EXPECT_THAT(error_of([&] { scaler.unscale_(*optimizer); }), HasSubstr("already called"));
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 0.5f);
    EXPECT_THAT(error_of([&] {
                  optimizer->session();
                  scaler.update();
                  scaler.unscale_(*optimizer);
                }),
                HasSubstr("already"));
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 0.5f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(WaitingFactors, ReadThroughTheBaseClassSayWhereToRead) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    ShardedGradScaler scaler(group);
    scaler.scale(loss_with(module->tensors[0], torch::full({1}, 0.5f))).backward();
    scaler.unscale_(*optimizer);
    auto& base = static_cast<torch::optim::Optimizer&>(*optimizer);
    if (group->getRank() == 0) {
      EXPECT_THAT(error_of([&] { base.param_groups()[0].params()[0].grad().item<float>(); }),
                  HasSubstr("ShardedOptimizer::param_groups()"));
      EXPECT_EQ(optimizer->param_groups()[0].params()[0].grad().item<float>(), 0.5f);
      EXPECT_EQ(base.param_groups()[0].params()[0].grad().item<float>(), 0.5f);
    }
    EXPECT_TRUE(scaler.step(*optimizer));
    EXPECT_EQ(module->tensors[0].item<float>(), 0.5f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 15: the scale and its inverse stay finite.
TEST(FieldCase15, TheScaleStaysFiniteAndPositive) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{0.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    ShardedGradScaler growing(group, GradScalerOptions().init_scale(std::ldexp(1.0, 120)).growth_interval(1));
    for (int i = 0; i < 20; ++i) {
      optimizer->zero_grad();
      growing.scale(loss_with(module->tensors[0], torch::zeros({1}))).backward();
      EXPECT_TRUE(growing.step(*optimizer));
      growing.update();
      EXPECT_TRUE(std::isfinite(growing.get_scale()) && static_cast<float>(1.0 / growing.get_scale()) > 0);
    }
    EXPECT_GT(growing.bounds_hit(), 0);
    ShardedGradScaler shrinking(group);
    for (int i = 0; i < 300; ++i) {
      optimizer->zero_grad();
      shrinking.scale(loss_with(module->tensors[0], torch::full({1}, kInf))).backward();
      EXPECT_FALSE(shrinking.step(*optimizer));
      shrinking.update();
    }
    EXPECT_GT(shrinking.get_scale(), 0.0);
    EXPECT_TRUE(std::isfinite(static_cast<float>(1.0 / shrinking.get_scale())));
    EXPECT_GT(shrinking.bounds_hit(), 0);
    const auto scaled = ShardedGradScaler(group).scale(torch::tensor(1.5f).to(torch::kHalf));
    EXPECT_EQ(scaled.scalar_type(), torch::kFloat);
    EXPECT_EQ(scaled.item<float>(), 98304.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 16: unscaled if and only if the loss was scaled; the check works without scaling.
TEST(FieldCase16, AnUnscaledLossIsNotDivided) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    for (const bool enabled : {false, true}) {
      Toy module = toy({{1.0f}}, torch::kBFloat16);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
      ShardedGradScaler scaler(group, GradScalerOptions().enabled(enabled));
      loss_with(module->tensors[0], torch::full({1}, 0.5f, torch::kBFloat16)).backward();
      EXPECT_TRUE(scaler.step(*optimizer));
      scaler.update();
      EXPECT_EQ(module->tensors[0].item<float>(), 0.5f);
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}
TEST(FieldCase16, ASkippedStepLeavesEverythingAsItWas) {
  for (const auto stage : all_stages()) {
    for (const bool with_scaler : {false, true}) {
      const auto results = run_threads(2, [&](int rank, const Group& group) {
        Toy module = toy_of({torch::ones({40}, torch::kBFloat16)});
        auto optimizer = shard(*module, torch::optim::Adam(module->parameters(), 0.1), group,
                               ShardOptions().stage(stage).skip_nonfinite_steps(true));
        ShardedGradScaler scaler(group, GradScalerOptions().init_scale(1.0));
        backward_with(module, {std::vector<float>(40, 1.0f)});
        optimizer->step();
        auto& key = optimizer->param_groups()[0].params()[0];
        auto& state = static_cast<torch::optim::AdamParamState&>(*optimizer->state().at(key.unsafeGetTensorImpl()));
        const std::vector<torch::Tensor> before{key.detach().clone(), state.exp_avg().clone(),
                                                state.exp_avg_sq().clone(), module->tensors[0].detach().clone()};
        optimizer->zero_grad();
        std::vector<float> gradient(40, 1.0f);
        if (rank == 1) gradient[3] = kInf;
        backward_with(module, {gradient});
        if (with_scaler) {
          EXPECT_FALSE(scaler.step(*optimizer));
        } else {
          optimizer->step();
        }
        const std::vector<torch::Tensor> after{key, state.exp_avg(), state.exp_avg_sq(), module->tensors[0]};
        for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i])) << i;
        EXPECT_EQ(state.step(), 1);
        EXPECT_EQ(optimizer->metrics().skipped_steps, 1);
        EXPECT_EQ(optimizer->metrics().steps, 1);
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(Scales, ThatDifferWithinAStepOrBetweenRanksAreAnErrorOnAllRanks) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    ShardedGradScaler scaler(group, GradScalerOptions().init_scale(8.0));
    const auto one = torch::ones({1});
    const auto differing = error_of([&] {
      if (rank == 1) {
        loss_with(module->tensors[0], one).backward();
      } else {
        scaler.scale(loss_with(module->tensors[0], one)).backward();
      }
    });
    EXPECT_THAT(differing, AllOf(HasSubstr("loss scales differ"), HasSubstr("ShardedGradScaler")));
    optimizer->zero_grad();
    scaler.scale(loss_with(module->tensors[0], one)).backward();
    EXPECT_THAT(error_of([&] {
                  loss_with(module->tensors[0], one).backward();
                  optimizer->finish_reduction();
                }),
                HasSubstr("scale"));
    optimizer->zero_grad();
    scaler.scale(loss_with(module->tensors[0], one)).backward();
    EXPECT_TRUE(scaler.step(*optimizer));
    scaler.update();
    EXPECT_EQ(module->tensors[0].item<float>(), 0.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Scaler, TwoOptimizersShareOneUpdate) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy first = toy({{1.0f}}), second = toy({{1.0f}});
    auto a = shard(*first, torch::optim::SGD(first->parameters(), 1.0), group);
    auto b = shard(*second, torch::optim::SGD(second->parameters(), 1.0), group);
    ShardedGradScaler scaler(group, GradScalerOptions().init_scale(8.0));
    scaler.scale(loss_with(first->tensors[0], torch::ones({1})) + loss_with(second->tensors[0], torch::full({1}, kInf)))
        .backward();
    EXPECT_TRUE(scaler.step(*a));
    EXPECT_FALSE(scaler.step(*b));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4.0);
    EXPECT_EQ(first->tensors[0].item<float>(), 0.0f);
    EXPECT_EQ(second->tensors[0].item<float>(), 1.0f);
    EXPECT_THAT(error_of([&] { scaler.update(); }), HasSubstr("call step() first"));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Scaler, RefusesImpossibleOptions) {
  const auto results = run_threads(1, [&](int, const Group& group) {
    EXPECT_THAT(error_of([&] { ShardedGradScaler(group, GradScalerOptions().init_scale(0)); }),
                HasSubstr("init_scale is 0"));
    EXPECT_THAT(error_of([&] { ShardedGradScaler(group, GradScalerOptions().growth_factor(1)); }),
                HasSubstr("growth_factor is 1"));
    EXPECT_THAT(error_of([&] { ShardedGradScaler(group, GradScalerOptions().backoff_factor(1)); }),
                HasSubstr("backoff_factor is 1"));
    EXPECT_THAT(error_of([&] { ShardedGradScaler(group, GradScalerOptions().growth_interval(0)); }),
                HasSubstr("growth_interval is 0"));
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
