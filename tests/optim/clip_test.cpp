// SPDX-License-Identifier: BSD-3-Clause
// One norm, one factor (docs/numerics.md, section 3). Field cases 7 to 12.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
constexpr double kInf = std::numeric_limits<double>::infinity();

std::unique_ptr<ShardedOptimizer> sgd(Toy& module, const Group& group, ShardOptions options = {}) {
  return shard(*module, torch::optim::SGD(module->parameters(), 1.0), group, options);
}

std::vector<torch::Tensor> sizes_cut_anywhere() {
  return {torch::zeros({3}),    torch::zeros({300}), torch::zeros({257, 9}), torch::zeros({1}),
          torch::zeros({4099}), torch::zeros({0}),   torch::zeros({40})};
}

// Field case 7: one number on every rank, for every world size, stage and bucket size, that of the unsharded gradient.
TEST(FieldCase07, TheNormHasTheSameBitsForEveryWorldSizeStageAndBucketSize) {
  for (const double p : {2.0, 1.0, 3.0, kInf}) {
    std::vector<std::string> reports;
    double reference = 0;
    for (const int world : {1, 2, 3, 4, 5, 8}) {
      for (const auto stage : all_stages()) {
        for (const int64_t bucket : {int64_t{4}, int64_t{2000}, int64_t{1} << 30}) {
          const auto results = run_threads(world, [&](int, const Group& group) {
            Toy module(sizes_cut_anywhere());
            auto optimizer =
                sgd(module, group, ShardOptions().stage(stage).bucket_bytes(bucket).gradient_divide_factor(world));
            std::vector<torch::Tensor> gradients;
            for (size_t i = 0; i < module->tensors.size(); ++i)
              gradients.push_back(random_values(static_cast<int64_t>(i), module->tensors[i].sizes()));
            // Sums of equal leaves over a power of two are exact; other world sizes get the leaves as one
            // absent-or-there pattern.
            backward_with(module->parameters(), gradients);
            std::ostringstream text;
            text << std::hexfloat << clip_grad_norm_(*optimizer, 1e30, p);
            return text.str();
          });
          ASSERT_TRUE(results.ok()) << results;
          for (const auto& result : results) EXPECT_EQ(result.report, results[0].report);
          if (world == 1 || world == 2 || world == 4 || world == 8) reports.push_back(results[0].report);
        }
      }
    }
    for (const auto& report : reports) EXPECT_EQ(report, reports[0]) << "p = " << p;
    std::vector<torch::Tensor> all;
    const auto shapes = sizes_cut_anywhere();
    for (size_t i = 0; i < shapes.size(); ++i)
      all.push_back(random_values(static_cast<int64_t>(i), shapes[i].sizes()).reshape({-1}).to(torch::kDouble));
    reference = torch::cat(all).norm(p).item<double>();
    EXPECT_NEAR(std::strtod(reports[0].c_str(), nullptr) / reference, 1.0, 1e-6) << "p = " << p;
  }
}

TEST(FieldCase07, ThreeFourTwelveGivesThirteen) {
  for (const int world : {1, 2, 3, 4}) {
    for (const auto stage : all_stages()) {
      const auto results = run_threads(world, [&](int, const Group& group) {
        Toy module = toy({{0.0f}, {0.0f}, {0.0f}});
        auto optimizer = sgd(module, group, ShardOptions().stage(stage));
        backward_with(module, {{3.0f}, {4.0f}, {12.0f}});
        EXPECT_EQ(clip_grad_norm_(*optimizer, 6.5), 13.0);
        EXPECT_FLOAT_EQ(whole_gradient(*optimizer, 0).item<float>(), 1.5f);
        EXPECT_FLOAT_EQ(whole_gradient(*optimizer, 1).item<float>(), 2.0f);
        EXPECT_FLOAT_EQ(whole_gradient(*optimizer, 2).item<float>(), 6.0f);
        EXPECT_NEAR(clip_grad_norm_(*optimizer, 100.0), 6.5, 1e-5) << "a second norm is that of the clipped gradients";
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

// Field case 8.
TEST(FieldCase08, EveryNormTypeAndTheTextInf) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    const auto fresh = [&](auto&& check) {
      Toy module = toy({{0.0f, 0.0f}, {0.0f}});
      auto optimizer = sgd(module, group);
      backward_with(module, {{3.0f, -7.0f}, {5.0f}});
      check(*optimizer);
    };
    fresh([](auto& o) { EXPECT_NEAR(clip_grad_norm_(o, 1e9, 1.0), 15.0, 15e-6); });
    fresh([](auto& o) { EXPECT_NEAR(clip_grad_norm_(o, 1e9, 2.0), std::sqrt(83.0), 1e-5); });
    fresh([](auto& o) { EXPECT_NEAR(clip_grad_norm_(o, 1e9, 3.0), 7.91046, 1e-5); });
    fresh([](auto& o) { EXPECT_NEAR(clip_grad_norm_(o, 1e9, kInf), 7.0, 0); });
    fresh([](auto& o) { EXPECT_NEAR(clip_grad_norm_(o, 1e9, "inf"), 7.0, 0); });
    fresh([](auto& o) { EXPECT_NEAR(clip_grad_norm_(o, 1e9, "3"), 7.91046, 1e-5); });
    fresh([](auto& o) {
      clip_grad_norm_(o, 3.5, kInf);
      const auto first = whole_gradient(o, 0);
      EXPECT_FLOAT_EQ(first[0].template item<float>(), 1.5f);
      EXPECT_FLOAT_EQ(first[1].template item<float>(), -3.5f);
      EXPECT_FLOAT_EQ(whole_gradient(o, 1).template item<float>(), 2.5f);
    });
    for (const double bad : {0.0, -1.0, -kInf, std::nan("")}) {
      fresh([&](auto& o) {
        EXPECT_THAT(error_of([&] { clip_grad_norm_(o, 1.0, bad); }), HasSubstr("expected a number above 0"));
      });
    }
    fresh([&](auto& o) { EXPECT_THAT(error_of([&] { clip_grad_norm_(o, -1.0); }), HasSubstr("expected 0 or more")); });
    fresh([&](auto& o) { EXPECT_THAT(error_of([&] { clip_grad_norm_(o, 1.0, "two"); }), HasSubstr("\"inf\"")); });
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 9: finite gradients give a finite norm.
TEST(FieldCase09, HugeAndTinyGradients) {
  const auto norm = [](int world, torch::Dtype dtype, float value, int count, double limit) {
    double result = 0;
    const auto results = run_threads(world, [&](int rank, const Group& group) {
      Toy module = toy_of({torch::zeros({count}, dtype)});
      auto optimizer = sgd(module, group);
      backward_with(module, {std::vector<float>(static_cast<size_t>(count), value)});
      const double n = clip_grad_norm_(*optimizer, limit);
      const auto gradient = whole_gradient(*optimizer, 0);
      if (limit < n) {
        EXPECT_NEAR(gradient[0].item<double>(), value * limit / n, 1e-5);
      }
      if (rank == 0) result = n;
    });
    EXPECT_TRUE(results.ok()) << results;
    return result;
  };
  EXPECT_EQ(norm(3, torch::kHalf, 300.0f, 1, 1.0), 300.0);
  EXPECT_NEAR(norm(2, torch::kHalf, 200.0f, 4096, 1e9), 12800.0, 1e-2);
  EXPECT_NEAR(norm(2, torch::kFloat, 1e20f, 4, 1.0) / 2e20, 1.0, 1e-6);
  EXPECT_NEAR(norm(2, torch::kFloat, 1e-30f, 4, 1.0) / 2e-30, 1.0, 1e-6);
  EXPECT_NEAR(norm(3, torch::kFloat, 1e-45f, 4, 1.0) / 2.8e-45, 1.0, 1e-2);
}
TEST(FieldCase09, Fp64GradientsBeyondTheRangeOfTheirSquares) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    for (const double value : {1e300, 1e-300}) {
      Toy module = toy_of({torch::zeros({400}, torch::kDouble)});
      auto optimizer = sgd(module, group);
      backward_with(module->parameters(), {torch::full({400}, value, torch::kDouble)});
      EXPECT_NEAR(clip_grad_norm_(*optimizer, kInf) / (20.0 * value), 1.0, 1e-9);
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 10: one policy for non-finite norms, on all ranks.
TEST(FieldCase10, NonFiniteNormsAlterNothing) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const int where : {0, 1, 2}) {
      const auto results = run_threads(3, [&](int, const Group& group) {
        Toy module = toy_of({torch::zeros({48})});
        auto optimizer = sgd(module, group);
        std::vector<float> gradient(48, 5.0f);
        gradient[static_cast<size_t>(16 * where)] = bad;
        backward_with(module, {gradient});
        const auto before = whole_gradient(*optimizer, 0);
        EXPECT_THAT(error_of([&] { clip_grad_norm_(*optimizer, 1.0, 2.0, true); }),
                    HasSubstr("no gradient was altered"));
        EXPECT_TRUE(same_bits(whole_gradient(*optimizer, 0), before));
        EXPECT_FALSE(std::isfinite(clip_grad_norm_(*optimizer, 1.0)));
        EXPECT_FALSE(std::isfinite(clip_grad_norm_(*optimizer, 1.0, kInf)));
        EXPECT_TRUE(same_bits(whole_gradient(*optimizer, 0), before));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

// Field case 11: any mix of dtypes, in any order.
TEST(FieldCase11, MixedDtypes) {
  for (const bool reversed : {false, true}) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      std::vector<torch::Tensor> values{torch::zeros({128}, torch::kBFloat16), torch::zeros({128})};
      if (reversed) std::swap(values[0], values[1]);
      Toy module(values);
      auto optimizer = sgd(module, group);
      backward_with(module->parameters(), {torch::full({128}, 1.0 / 64), torch::full({128}, 1.0 / 64)});
      EXPECT_EQ(clip_grad_norm_(*optimizer, 0.125), 0.25);
      for (size_t i = 0; i < 2; ++i) {
        const auto gradient = whole_gradient(*optimizer, i);
        EXPECT_LT((gradient * 128 - 1).abs().max().item<double>(), 1e-5);
      }
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}
TEST(FieldCase11, ARankMayUseADtypeTheOthersDoNot) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy_of({torch::zeros({4}, torch::kBFloat16), torch::zeros({4}), torch::zeros({4}, torch::kDouble),
                         torch::zeros({4}, torch::kHalf)});
    auto optimizer = sgd(module, group, ShardOptions().gradient_divide_factor(1));
    std::vector<torch::Tensor> gradients(4);
    gradients[static_cast<size_t>(rank)] = torch::full({4}, 1.0);
    gradients[3] = torch::full({4}, rank == 0 ? 1.0 : 0.0);
    backward_with(module->parameters(), gradients);
    EXPECT_EQ(clip_grad_norm_(*optimizer, 1e9), 4.0);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 12: tied parameters count, move and are reduced once.
TEST(FieldCase12, OneTensorUnderTwoNames) {
  struct TiedImpl : torch::nn::Module {
    torch::Tensor a = register_parameter("a", torch::zeros({2})), b = register_parameter("b", a);
  };
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      auto module = std::make_shared<TiedImpl>();
      ASSERT_EQ(module->parameters().size(), 2u);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group, ShardOptions().stage(stage));
      ShardedGradScaler scaler(group, GradScalerOptions().init_scale(8.0));
      scaler.scale((module->a * torch::tensor({3.0f, 4.0f})).sum()).backward();
      scaler.unscale_(*optimizer);
      EXPECT_EQ(clip_grad_norm_(*optimizer, 1e9), 5.0);
      EXPECT_TRUE(scaler.step(*optimizer));
      scaler.update();
      EXPECT_FLOAT_EQ(module->a[0].item<float>(), -0.3f);
      EXPECT_FLOAT_EQ(module->b[1].item<float>(), -0.4f);
      EXPECT_EQ(optimizer->param_groups()[0].params().size(), 1u);
      EXPECT_EQ(full_state_dict(*optimizer).size(), 2u);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FieldCase12, OneTensorTwiceInAScriptedModuleOrInTheOptimizersList) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    torch::jit::Module scripted("tied");
    auto weight = torch::zeros({2}).requires_grad_();
    scripted.register_parameter("a", weight, false);
    scripted.register_parameter("b", weight, false);
    std::vector<torch::Tensor> listed;
    for (const auto& parameter : scripted.parameters()) listed.push_back(parameter);
    ASSERT_EQ(listed.size(), 2u);
    auto optimizer = shard(scripted, torch::optim::SGD(listed, 0.1), group);
    torch::autograd::backward({weight}, {torch::tensor({3.0f, 4.0f})});
    EXPECT_EQ(clip_grad_norm_(*optimizer, 1e9), 5.0);
    optimizer->step();
    EXPECT_FLOAT_EQ(weight[0].item<float>(), -0.3f);
    EXPECT_EQ(optimizer->metrics().bytes_reduced, 8) << "reduced once";
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ClipGradNorm, OverSeveralOptimizersIsOneNormAndOneFactor) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy first = toy({{0.0f}}), second = toy({{0.0f}, {0.0f}});
    auto a = sgd(first, group), b = sgd(second, group);
    backward_with(first, {{3.0f}});
    backward_with(second, {{4.0f}, {12.0f}});
    EXPECT_EQ(clip_grad_norm_({a.get(), b.get()}, 6.5), 13.0);
    EXPECT_FLOAT_EQ(whole_gradient(*a, 0).item<float>(), 1.5f);
    EXPECT_FLOAT_EQ(whole_gradient(*b, 1).item<float>(), 6.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ClipGradNorm, WithoutAnyGradientIsZero) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = sgd(module, group);
    EXPECT_EQ(clip_grad_norm_(*optimizer, 1.0), 0.0);
    optimizer->step();
    EXPECT_EQ(module->tensors[0].item<float>(), 1.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ClipGradNorm, SeesWhatTheUserWroteToTheShards) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy_of({torch::zeros({48})});
    auto optimizer = sgd(module, group);
    backward_with(module, {std::vector<float>(48, 1.0f)});
    optimizer->finish_reduction();
    if (rank == 1) {  // one rank alone: the others must not use what they recorded
      torch::NoGradGuard no_grad;
      optimizer->param_groups()[0].params()[0].mutable_grad().mul_(3.0);
    }
    EXPECT_NEAR(clip_grad_norm_(*optimizer, 1e9), std::sqrt(16 * (1.0 + 9.0 + 1.0)), 1e-9);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ClipGradNorm, OfScaledGradientsIsAnErrorThatNamesUnscale) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = sgd(module, group);
    ShardedGradScaler scaler(group);
    scaler.scale(module->tensors[0].sum()).backward();
    EXPECT_THAT(error_of([&] { clip_grad_norm_(*optimizer, 1.0); }), HasSubstr("unscale_"));
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("ShardedGradScaler::step"));
    EXPECT_EQ(module->tensors[0].item<float>(), 1.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
