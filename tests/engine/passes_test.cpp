// SPDX-License-Identifier: BSD-3-Clause
// What counts as a pass, and what happens to gradients that are deferred, missing, late, zeroed or left by an
// exception.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Field case 5: every pattern of synchronised and deferred passes gives the mean over ranks of each rank's sum.
TEST(FieldCase05, EveryPatternOfDeferredPassesGivesTheSameMean) {
  for (const auto stage : all_stages()) {
    for (int pattern = 0; pattern < 8; ++pattern) {
      const auto results = run_threads(2, [&](int rank, const Group& group) {
        Toy module = toy({{0.0f}});
        auto optimizer =
            shard(*module, torch::optim::SGD(module->parameters(), 0.0), group, ShardOptions().stage(stage));
        for (int pass = 0; pass < 4; ++pass) {
          const float value = static_cast<float>((pass + 1) * (rank == 0 ? 1 : 10));
          if (pass < 3 && (pattern >> pass & 1)) {
            NoSyncGuard later(*optimizer);
            backward_with(module, {{value}});
          } else {
            backward_with(module, {{value}});
          }
        }
        EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 55.0f) << "pattern " << pattern;
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(NoSyncGuard, LeftByAnExceptionRestoresTheEarlierMode) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{0.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    try {
      NoSyncGuard later(*optimizer);
      throw std::runtime_error("user");
    } catch (const std::runtime_error&) {
    }
    backward_with(module, {{3.0f}});
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 3.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(NoSyncGuard, AddsUpLocallyInFp32AndJoinsEvenAnUnusedParameter) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{0.0f}, {0.0f}}, torch::kBFloat16);
    auto optimizer =
        shard(*module, torch::optim::SGD(module->parameters(), 0.0), group, ShardOptions().gradient_divide_factor(1));
    {
      NoSyncGuard later(*optimizer);
      backward_with(module, {{256.0f}, {static_cast<float>(rank + 1)}});
      backward_with(module, {{1.0f}, {}});
    }
    backward_with(module, {{-256.0f}, {}});
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 3.0f);
    EXPECT_EQ(whole_gradient(*optimizer, 1).item<float>(), 6.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(NoSyncGuard, AStepWithOnlyDeferredPassesIsAnErrorOnAllRanks) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    {
      NoSyncGuard later(*optimizer);
      backward_with(module, {{1.0f}});
    }
    EXPECT_THAT(error_of([&] { optimizer->step(); }), AllOf(HasSubstr("NoSyncGuard"), HasSubstr("zero_grad()")));
    EXPECT_EQ(module->tensors[0].item<float>(), 1.0f);
    optimizer->zero_grad();
    backward_with(module, {{1.0f}});
    optimizer->step();
    EXPECT_EQ(module->tensors[0].item<float>(), 0.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(NoSyncGuard, PatternsThatDifferAreAnErrorOnAllRanks) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    if (rank != 1) {
      NoSyncGuard later(*optimizer);
      backward_with(module, {{1.0f}});
    }
    EXPECT_THAT(error_of([&] { backward_with(module, {{1.0f}}); }),
                AllOf(HasSubstr("deferred different numbers of passes"), HasSubstr("rank 1")));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 6: ranks that use different parameters.
TEST(FieldCase06, ParametersUsedOnSomeRanksOnly) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(2, [&](int rank, const Group& group) {
      // a, b, c: fp32; d: 16-bit, used in the last of three passes only.
      Toy module =
          toy_of({torch::zeros({4}), torch::zeros({4}), torch::zeros({4}), torch::zeros({4}, torch::kBFloat16)});
      auto optimizer = shard(*module, torch::optim::Adam(module->parameters(), 0.1), group,
                             ShardOptions().stage(stage).bucket_bytes(16));
      const std::vector<float> two(4, 2.0f), six(4, 6.0f), none;
      for (int step = 0; step < 2; ++step) {
        optimizer->zero_grad();
        backward_with(module, {rank == 0 ? two : none, rank == 1 ? six : none, none, none});
        if (step == 0) {
          const auto a = whole_gradient(*optimizer, 0), b = whole_gradient(*optimizer, 1);
          EXPECT_TRUE(a.eq(1.0f).all().item<bool>()) << a;
          EXPECT_TRUE(b.eq(3.0f).all().item<bool>()) << b;
        }
        EXPECT_FALSE(whole_gradient(*optimizer, 2).defined());
        optimizer->step();
        EXPECT_TRUE(module->tensors[2].eq(0.0f).all().item<bool>());
        const auto& c_shard = optimizer->param_groups()[0].params()[2];
        EXPECT_EQ(optimizer->state().count(c_shard.unsafeGetTensorImpl()), 0u);
      }
      optimizer->zero_grad();
      backward_with(module, {two, none, none, none});
      backward_with(module, {two, none, none, none});
      backward_with(module, {two, none, none, std::vector<float>(4, 0.5f + static_cast<float>(rank))});
      EXPECT_TRUE(whole_gradient(*optimizer, 3).eq(1.0f).all().item<bool>());
      EXPECT_TRUE(whole_gradient(*optimizer, 0).eq(6.0f).all().item<bool>());
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(AbsentLeaves, KeepNegativeZero) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{0.0f}, {0.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    backward_with(module, {rank == 1 ? std::vector<float>{-0.0f} : std::vector<float>{}, {1.0f}});
    EXPECT_TRUE(std::signbit(whole_gradient(*optimizer, 0).item<float>()));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(EmptyPass, LetsARankWithLessDataKeepStep) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{0.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    backward_with(module, {{3.0f}});
    if (rank == 2) {
      optimizer->empty_pass();
    } else {
      backward_with(module, {{6.0f}});
    }
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 7.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Passes, ThatDifferInNumberAreTheSameErrorOnAllRanks) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    const auto text = error_of([&] {
      backward_with(module, {{1.0f}});
      if (rank == 1) backward_with(module, {{1.0f}});
      optimizer->step();
    });
    EXPECT_THAT(text, HasSubstr("empty_pass()"));
    EXPECT_EQ(module->tensors[0].item<float>(), 1.0f);
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("empty_pass()")) << "later calls fail at once";
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Passes, ABackwardThatReachesNothingIsNotOne) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto other = torch::ones({1}, torch::requires_grad());
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    (other * 2).sum().backward();
    EXPECT_EQ(optimizer->metrics().passes, 0);
    backward_with(module, {{1.0f}});
    EXPECT_EQ(optimizer->metrics().passes, 1);
    optimizer->step();
    EXPECT_EQ(module->tensors[0].item<float>(), 0.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("user code failed");
  }
};

// Gradients of the later parameter come first; then user code throws on the way to the earlier one.
void failing_backward(Toy& module) {
  (ThrowInBackward::apply(module->tensors[0]) * module->tensors[1]).sum().backward();
}

TEST(ExceptionInBackward, OnAllRanksLeavesTheOptimizerUsable) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy({{2.0f}, {3.0f}});
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group,
                             ShardOptions().stage(stage).bucket_bytes(1));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        EXPECT_THROW(failing_backward(module), std::runtime_error);
        optimizer->zero_grad();
        backward_with(module, {{1.0f}, {1.0f}});
        optimizer->step();
      }
      EXPECT_EQ(module->tensors[0].item<float>(), -1.0f);
      EXPECT_EQ(module->tensors[1].item<float>(), 0.0f);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(ExceptionInBackward, OnOneRankIsAnErrorOnTheOthersAndZeroGradRecovers) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{2.0f}, {3.0f}});
    auto optimizer =
        shard(*module, torch::optim::SGD(module->parameters(), 1.0), group, ShardOptions().bucket_bytes(1));
    for (int step = 0; step < 2; ++step) {
      if (rank == 1) {
        EXPECT_THROW(failing_backward(module), std::runtime_error);
      } else {
        EXPECT_THAT(error_of([&] {
                      backward_with(module, {{1.0f}, {1.0f}});
                    }),
                    AllOf(HasSubstr("rank 1"), HasSubstr("left by an exception")));
      }
      optimizer->zero_grad();
    }
    backward_with(module, {{1.0f}, {1.0f}});
    optimizer->step();
    EXPECT_EQ(module->tensors[0].item<float>(), 1.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ExceptionInBackward, MustBeZeroedBeforeTheStep) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{2.0f}, {3.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    EXPECT_THROW(failing_backward(module), std::runtime_error);
    EXPECT_THAT(error_of([&] { optimizer->step(); }),
                AllOf(HasSubstr("left by an exception"), HasSubstr("zero_grad()")));
    EXPECT_EQ(module->tensors[0].item<float>(), 2.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// A custom function that runs a backward of its own inside its backward, as activation recomputation does.
struct Recompute : torch::autograd::Function<Recompute> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight) {
    context->save_for_backward({x});
    context->saved_data["weight"] = weight;
    return x * weight.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::AutoGradMode enabled(true);
    auto y = x * context->saved_data["weight"].toTensor();
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), torch::Tensor()};
  }
};

TEST(Recomputation, InnerBackwardsBelongToTheOuterPass) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      Toy module = toy({{2.0f}, {3.0f}, {5.0f}});
      auto params = module->parameters();
      auto optimizer = shard(*module, torch::optim::SGD(params, 0.0), group,
                             ShardOptions().stage(stage).bucket_bytes(1).gradient_divide_factor(1));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        auto x = torch::full({1}, static_cast<float>(rank + 1), torch::requires_grad());
        // The first weight is used in two recomputed segments and once outside: three contributions in one pass.
        auto y = Recompute::apply(Recompute::apply(x, params[0]), params[1]) * params[2];
        Recompute::apply(y, params[0]).sum().backward();
        EXPECT_EQ(optimizer->metrics().passes, 1);
        // y = x*2*3*5*2: d/dp0 = 2*x*2*15/... = x * 60 with p0 twice: 2 * x * p0 * p1 * p2
        EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 60.0f * 6);
        EXPECT_EQ(whole_gradient(*optimizer, 1).item<float>(), 20.0f * 6);
        EXPECT_EQ(whole_gradient(*optimizer, 2).item<float>(), 12.0f * 6);
      }
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Zeroing, ThroughTheModuleOrTheBaseClassIsNoticed) {
  for (const auto stage : all_stages()) {
    for (int way = 0; way < 3; ++way) {
      const auto results = run_threads(3, [&](int, const Group& group) {
        Toy module = toy({{0.0f}, {0.0f}});
        auto optimizer =
            shard(*module, torch::optim::SGD(module->parameters(), 0.0), group, ShardOptions().stage(stage));
        for (int step = 0; step < 3; ++step) {
          backward_with(module, {{1.0f}, {2.0f}});
          backward_with(module, {{1.0f}, {2.0f}});
          EXPECT_EQ(whole_gradient(*optimizer, 1).item<float>(), 4.0f) << "way " << way << " step " << step;
          optimizer->step();
          if (way == 0) optimizer->zero_grad();
          if (way == 1) static_cast<torch::optim::Optimizer&>(*optimizer).zero_grad();
          if (way == 2) module->zero_grad();
        }
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(Zeroing, InTheMiddleOfAccumulationThroughTheModule) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{0.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    backward_with(module, {{100.0f}});
    module->zero_grad();
    backward_with(module, {{1.0f}});
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 1.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Zeroing, WithoutAnyAddsToTheStaleGradient) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy({{0.0f}, {0.0f}});
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group, ShardOptions().stage(stage));
      backward_with(module, {{8.0f}, {1.0f}});
      clip_grad_norm_(*optimizer, 4.0, std::numeric_limits<double>::infinity());
      optimizer->step();
      backward_with(module, {{1.0f}, {}});
      EXPECT_FLOAT_EQ(whole_gradient(*optimizer, 0).item<float>(), 5.0f);
      EXPECT_FLOAT_EQ(whole_gradient(*optimizer, 1).item<float>(), 0.5f);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Zeroing, InPlaceLeavesPositiveZerosAndTheStateAdvances) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({std::vector<float>(40, 1.0f), {1.0f}});
    auto optimizer = shard(*module, torch::optim::Adam(module->parameters(), 0.1), group);
    backward_with(module, {std::vector<float>(40, 1.0f), {}});
    optimizer->step();
    optimizer->zero_grad(false);
    const auto zeros = whole_gradient(*optimizer, 0);
    EXPECT_TRUE(same_bits(zeros, torch::zeros({40})));
    EXPECT_FALSE(whole_gradient(*optimizer, 1).defined());
    optimizer->step();
    auto& key = optimizer->param_groups()[0].params()[0];
    EXPECT_EQ(static_cast<torch::optim::AdamParamState&>(*optimizer->state().at(key.unsafeGetTensorImpl())).step(), 2);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(StaleGradients, ReadOrClippedLocallySayWhatToCall) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy({{3.0f}, {4.0f}});
      torch::optim::SGD inner(module->parameters(), 0.1);
      auto optimizer = shard(*module, std::move(inner), group, ShardOptions().stage(stage));
      backward_with(module, {{3.0f}, {4.0f}});
      EXPECT_THAT(error_of([&] { module->tensors[0].grad().item<float>(); }), HasSubstr("finish_reduction()"));
      EXPECT_THAT(error_of([&] { torch::nn::utils::clip_grad_norm_(module->parameters(), 1.0); }),
                  HasSubstr("trueshard::clip_grad_norm_"));
      EXPECT_THAT(error_of([&] { inner.step(); }), HasSubstr("ShardedOptimizer"));
      EXPECT_EQ(clip_grad_norm_(*optimizer, 100.0), 5.0);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Frozen, ParametersThatDifferBetweenRanksAreAnError) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}, {1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group);
    if (rank == 1) module->tensors[1].set_requires_grad(false);
    EXPECT_THAT(error_of([&] {
                  backward_with(module, {{1.0f}, rank == 1 ? std::vector<float>{} : std::vector<float>{1.0f}});
                }),
                AllOf(HasSubstr("'p1'"), HasSubstr("trainable on rank 0"), HasSubstr("frozen on rank 1")));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 23, as far as it needs no files.
TEST(FieldCase23, FrozenParametersStayAndUnfreezeAsFreshOnes) {
  const auto results = run_threads(2, [&](int, const Group& group) {
    Toy module = toy({{1.0f}, {7.0f}});
    module->tensors[1].set_requires_grad(false);
    auto optimizer = shard(
        *module, torch::optim::AdamW(module->parameters(), torch::optim::AdamWOptions(0.125).weight_decay(0.1)), group);
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      (module->tensors[0] * module->tensors[1]).sum().backward();
      optimizer->step();
    }
    EXPECT_EQ(module->tensors[1].item<float>(), 7.0f);
    EXPECT_EQ(full_state_dict(*optimizer)["p1"].item<float>(), 7.0f);
    static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[0].options()).weight_decay(0);
    module->tensors[1].set_requires_grad(true);
    optimizer->zero_grad();
    (module->tensors[1] * 2).sum().backward();
    optimizer->step();
    EXPECT_NEAR(module->tensors[1].item<float>(), 7.0f - 0.125f, 1e-5);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(TwoOptimizers, OnOneGroupMayBeReachedInAnyOrder) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy first = toy({{1.0f}, {2.0f}}), second = toy({{3.0f}, {4.0f}});
    auto a = shard(*first, torch::optim::SGD(first->parameters(), 0.0), group, ShardOptions().bucket_bytes(1));
    auto b = shard(*second, torch::optim::SGD(second->parameters(), 0.0), group, ShardOptions().bucket_bytes(1));
    for (int step = 0; step < 4; ++step) {
      a->zero_grad();
      b->zero_grad();
      std::vector<torch::Tensor> roots = first->parameters(), grads;
      for (const auto& p : second->parameters()) roots.push_back(p);
      if ((rank + step) % 2) std::reverse(roots.begin(), roots.end());
      for (const auto& root : roots) grads.push_back(torch::full_like(root, 2.0f));
      torch::autograd::backward(roots, grads);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(whole_gradient(*a, i).item<float>(), 2.0f);
        EXPECT_EQ(whole_gradient(*b, i).item<float>(), 2.0f);
      }
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Sparse, GradientsAreMergedInFp32AndTreatedAsDense) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    auto optimizer = shard(*embedding, torch::optim::SGD(embedding->parameters(), 0.0), group);
    embedding->forward(torch::tensor({int64_t{1}, int64_t{1}, int64_t{rank}})).sum().backward();
    const auto gradient = whole_gradient(*optimizer, 0).view({5, 2}) * 3;
    EXPECT_NEAR(gradient[1][0].item<float>(), 7.0f, 1e-5);
    EXPECT_NEAR(gradient[0][1].item<float>(), 1.0f, 1e-5);
    EXPECT_EQ(gradient[4][0].item<float>(), 0.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
