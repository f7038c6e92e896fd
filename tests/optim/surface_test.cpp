// SPDX-License-Identifier: BSD-3-Clause
// The rest of libtorch's surface around a sharded optimizer: each works as in libtorch, or throws and names what to
// use.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Surface, ClosuresAreRunBeforeTheStep) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{3.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group);
    const auto loss = optimizer->step([&] {
      optimizer->zero_grad();
      auto value = (module->tensors[0] * 2).sum();
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<float>(), 6.0f);
    EXPECT_EQ(module->tensors[0].item<float>(), 2.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, GroupsCanNotBeAddedLater) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{3.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group);
    torch::optim::OptimizerParamGroup extra({torch::zeros({1})});
    EXPECT_THAT(error_of([&] { optimizer->add_param_group(extra); }), HasSubstr("before shard()"));
    static_cast<torch::optim::Optimizer&>(*optimizer).add_param_group(extra);
    backward_with(module, {{1.0f}});
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("parameter groups"));
    EXPECT_EQ(module->tensors[0].item<float>(), 3.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, SavingTheOptimizerSaysWhatToUseAndTheModuleSavesAsUsual) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{3.0f, 4.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group);
    std::stringstream stream;
    EXPECT_THAT(error_of([&] { torch::save(static_cast<torch::optim::Optimizer&>(*optimizer), stream); }),
                HasSubstr("full_state_dict"));
    std::stringstream saved;
    torch::save(module, saved);
    Toy other = toy({{0.0f, 0.0f}});
    torch::load(other, saved);
    EXPECT_TRUE(same_bits(other->tensors[0], module->tensors[0]));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, ParameterHooksAndGradientPenaltiesWork) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{3.0f}});
    auto& p = module->tensors[0];
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    p.register_hook([](torch::Tensor gradient) { return gradient * 10; });
    backward_with(module, {{1.0f}});
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 10.0f);
    optimizer->zero_grad();
    // The hook also multiplies what autograd::grad returns: (10 * 3 p^2)^2 differentiated is 3600 p^3, and 10 times
    // that again.
    const auto first = torch::autograd::grad({p.pow(3).sum()}, {p}, {}, true, true)[0];
    first.pow(2).sum().backward();
    EXPECT_NEAR(whole_gradient(*optimizer, 0).item<float>(), 36000 * 27.0f, 1.0f);
    optimizer->zero_grad();
    p.pow(2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    EXPECT_EQ(whole_gradient(*optimizer, 0).item<float>(), 60.0f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, ClipGradValueOnTheShards) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{3.0f}, {1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    backward_with(module, {{-30.0f}, {0.25f}});
    optimizer->finish_reduction();
    torch::nn::utils::clip_grad_value_(optimizer->parameters(), 0.5);
    optimizer->step();
    EXPECT_EQ(module->tensors[0].item<float>(), 3.5f);
    EXPECT_EQ(module->tensors[1].item<float>(), 0.75f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, SchedulersSetTheRateThroughTheBaseClass) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{0.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 1.0), group);
    torch::optim::StepLR schedule(*optimizer, 1, 0.5);
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      backward_with(module, {{1.0f}});
      optimizer->step();
      schedule.step();
    }
    EXPECT_EQ(module->tensors[0].item<float>(),
              -2.5f);  // libtorch's StepLR leaves the first two rates alone: 1, 1, 0.5
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, TheModuleGoesOnPlainAfterTheOptimizerIsGone) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    {
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group);
      backward_with(module, {{1.0f}});
      optimizer->step();
    }
    torch::optim::SGD plain(module->parameters(), 1.0);
    backward_with(module, {{2.0f}});
    plain.step();
    EXPECT_EQ(module->tensors[0].item<float>(), -1.5f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Surface, ACloneOfTheModuleIsUnmanaged) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    torch::nn::Linear linear(3, 2);
    auto optimizer = shard(*linear, torch::optim::SGD(linear->parameters(), 0.5), group);
    auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(linear->clone());
    EXPECT_TRUE(same_bits(copy->weight, linear->weight));
    copy->forward(torch::ones({1, 3})).sum().backward();
    EXPECT_EQ(copy->weight.grad().sum().item<float>(), 6.0f);
    EXPECT_EQ(optimizer->metrics().passes, 0);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 22, as far as it needs no files: state and options follow the parameter, not its position.
TEST(FieldCase22, StateAndOptionsFollowTheParameter) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy_of({torch::zeros({40}), torch::zeros({40})});
      auto& first = module->tensors[0];
      auto& second = module->tensors[1];
      std::vector<torch::optim::OptimizerParamGroup> groups;  // in the reverse order of the module
      groups.emplace_back(std::vector<torch::Tensor>{second},
                          std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(1.0).momentum(0.5)));
      groups.emplace_back(std::vector<torch::Tensor>{first},
                          std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.5).momentum(0.5)));
      torch::optim::SGD plain(groups, torch::optim::SGDOptions(1.0));
      first.mutable_grad() = torch::full({40}, 1.0f);
      second.mutable_grad() = torch::full({40}, 100.0f);
      plain.step();  // momentum 1 and 100; weights -0.5 and -100
      plain.zero_grad();
      auto optimizer = shard(*module, std::move(plain), group, ShardOptions().stage(stage));
      backward_with(module->parameters(), {torch::zeros({40}), torch::zeros({40})});
      optimizer->step();
      EXPECT_TRUE(first.eq(-0.5f - 0.25f).all().item<bool>()) << first;
      EXPECT_TRUE(second.eq(-100.0f - 50.0f).all().item<bool>()) << second;
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

// ---- what shard() refuses, on all ranks --------------------------------------------------------------------------

TEST(ShardRefuses, WhatDiffersBetweenRanksNamingTheFirstDifference) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = rank == 1 ? toy({{1.0f}, {1.0f, 2.0f}}) : toy({{1.0f}, {1.0f}});
    const auto text = error_of([&] { shard(*module, torch::optim::SGD(module->parameters(), 0.5), group); });
    EXPECT_THAT(text,
                AllOf(HasSubstr("ranks differ"), HasSubstr("rank 1 has [parameter 'p1'"), HasSubstr("on all ranks")));
    Toy same = toy({{1.0f}});
    EXPECT_THAT(error_of([&] { shard(*same, torch::optim::SGD(same->parameters(), rank == 2 ? 0.5 : 0.25), group); }),
                HasSubstr("lr 0.25"));
    EXPECT_THAT(error_of([&] {
                  shard(*same, torch::optim::SGD(same->parameters(), 0.5), group,
                        ShardOptions().bucket_bytes(rank + 1));
                }),
                HasSubstr("bucket_bytes 1"));
    auto fine = shard(*same, torch::optim::SGD(same->parameters(), 0.5), group);  // nothing was left half-done
    backward_with(same, {{1.0f}});
    fine->step();
    EXPECT_EQ(same->tensors[0].item<float>(), 0.5f);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ShardRefuses, AnErrorOfOneRankIsEverybodys) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f}});
    auto stray = torch::zeros({1}, torch::requires_grad());
    auto parameters = module->parameters();
    if (rank == 2) parameters.push_back(stray);
    EXPECT_THAT(error_of([&] { shard(*module, torch::optim::SGD(parameters, 0.5), group); }),
                AllOf(HasSubstr("rank 2:"), HasSubstr("not a parameter of the module")));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ShardRefuses, BadOptions) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    const auto refused = [&](ShardOptions options) {
      return error_of([&] { shard(*module, torch::optim::SGD(module->parameters(), 0.5), group, options); });
    };
    EXPECT_THAT(refused(ShardOptions().stage(static_cast<Stage>(7))), HasSubstr("stage is 7"));
    EXPECT_THAT(refused(ShardOptions().bucket_bytes(0)), HasSubstr("bucket_bytes is 0"));
    EXPECT_THAT(refused(ShardOptions().gradient_divide_factor(0.0)), HasSubstr("gradient_divide_factor is 0"));
    EXPECT_THAT(refused(ShardOptions().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kLong))),
                HasSubstr("param_dtype is Long"));
    EXPECT_THAT(refused(ShardOptions().mp_policy(MixedPrecisionPolicy().full_precision_modules({"no_such"}))),
                HasSubstr("'no_such'"));
    EXPECT_THAT(error_of([&] { shard(*module, torch::optim::LBFGS(module->parameters()), group); }),
                HasSubstr("LBFGS"));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(ShardRefuses, ParametersThatShareOneStorage) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    struct SharedImpl : torch::nn::Module {
      torch::Tensor base = torch::zeros({4});
      SharedImpl() {
        register_parameter("a", base.narrow(0, 0, 4).detach());
        register_parameter("b", base.narrow(0, 0, 4).detach());
      }
    };
    SharedImpl module;
    EXPECT_THAT(error_of([&] { shard(module, torch::optim::SGD(module.parameters(), 0.5), group); }),
                AllOf(HasSubstr("'a'"), HasSubstr("'b'"), HasSubstr("share one storage")));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// ---- seeing what happened ------------------------------------------------------------------------------------------

TEST(Observe, RangesShowUpInTorchsProfiler) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        const std::lock_guard<std::mutex> lock(mutex);
        names.insert(function.name());
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group);
    backward_with(module, {{1.0f}});
    optimizer->step();
  });
  at::removeCallback(handle);
  ASSERT_TRUE(results.ok()) << results;
  for (const char* name : {"trueshard::reduce_gradients", "trueshard::finish_reduction", "trueshard::step",
                           "trueshard::publish_parameters"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST(Observe, MetricsCount) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy_of({torch::zeros({96})});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group,
                           ShardOptions().share_parameters(false));  // so that there is something to gather
    ShardedGradScaler scaler(group, GradScalerOptions().init_scale(4.0));
    scaler.scale(module->tensors[0].sum()).backward();
    scaler.unscale_(*optimizer);
    const double norm = clip_grad_norm_(*optimizer, 1.0);
    scaler.step(*optimizer);
    const auto metrics = optimizer->metrics();
    EXPECT_EQ(metrics.steps, 1);
    EXPECT_EQ(metrics.skipped_steps, 0);
    EXPECT_EQ(metrics.loss_scale, 4.0);
    EXPECT_EQ(metrics.grad_norm, norm);
    EXPECT_EQ(metrics.bytes_reduced, 96 * 4);
    EXPECT_EQ(metrics.bytes_gathered, 2 * 32 * 4);
    EXPECT_GT(metrics.collectives, 0);
    EXPECT_GE(metrics.seconds_communicating, 0.0);
    EXPECT_EQ(metrics.intra_op_threads, at::get_num_threads());
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
