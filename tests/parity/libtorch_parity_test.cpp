// SPDX-License-Identifier: BSD-3-Clause
// The plain libtorch loop as the measure (docs/numerics.md, section 5): on one rank its bits, on more ranks the bits of
// the canonical tree stepped by libtorch's own optimizer on whole parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/parity/nets.h"
#include "tests/parity/optimizers.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// An ordinary loop; it does not know which optimizer it has.
template <typename Optimizer>
void train(const Trainee& model, Optimizer& optimizer, int steps, int passes) {
  torch::optim::StepLR schedule(optimizer, 2, 0.5);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < passes; ++pass) loss_of(model, batch(step, pass)).backward();
    optimizer.step();
    schedule.step();
  }
}

class EveryOptimizer : public ::testing::TestWithParam<int> {
 protected:
  const OptimizerCase& optimizer() const { return optimizer_cases()[static_cast<size_t>(GetParam())]; }
};
INSTANTIATE_TEST_SUITE_P(Parity, EveryOptimizer, ::testing::Range(0, static_cast<int>(optimizer_cases().size())),
                         [](const auto& each) { return optimizer_cases()[static_cast<size_t>(each.param)].name; });

void expect_plain_bits(const OptimizerCase& optimizer, const std::function<Trainee()>& make, int passes) {
  const Trainee plain = make();
  const auto plain_optimizer = optimizer.make(one_group(plain.parameters));
  train(plain, *plain_optimizer, 5, passes);
  for (const auto stage : all_stages()) {
    const auto results = run_threads(1, [&](int, const Group& group) {
      const Trainee model = make();
      auto sharded = model.shard(optimizer.make(one_group(model.parameters)), group, ShardOptions().stage(stage));
      train(model, *sharded, 5, passes);
      EXPECT_EQ(first_difference(contents(model), contents(plain)), -1)
          << optimizer.name << " stage " << static_cast<int>(stage) << " passes " << passes;
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST_P(EveryOptimizer, OnOneRankGivesTheBitsOfThePlainLoop) {
  for (const int passes : {1, 2, 3})
    expect_plain_bits(
        optimizer(), [] { return eager_net(); }, passes);
}
TEST_P(EveryOptimizer, OnOneRankGivesTheBitsOfThePlainLoopForTorchScript) {
  for (const int passes : {1, 3})
    expect_plain_bits(
        optimizer(), [] { return script_net(); }, passes);
}

// Plain libtorch for three steps, then three more with the same optimizer: sharded on `world` ranks.
TEST_P(EveryOptimizer, KeepsTheStateItHadBeforeShard) {
  const auto first_half = [&](const Trainee& model) {
    auto made = optimizer().make(one_group(model.parameters));
    for (int step = 0; step < 3; ++step) {
      made->zero_grad();
      loss_of(model, batch(step, 0)).backward();
      made->step();
    }
    made->zero_grad();
    return made;
  };
  for (const int world : {1, 3}) {
    Trainee whole = eager_net();
    auto plain = first_half(whole);
    Reference reference(whole, world, 1);
    for (int step = 3; step < 6; ++step) {
      reference.gradients(step);
      for (size_t i = 0; i < whole.parameters.size(); ++i)
        whole.parameters[i].mutable_grad() = reference.masters[i].grad();
      plain->step();
    }
    for (const auto stage : all_stages()) {
      const auto results = run_threads(world, [&](int rank, const Group& group) {
        const Trainee model = eager_net();
        auto sharded = model.shard(first_half(model), group, ShardOptions().stage(stage).bucket_bytes(256));
        for (int step = 3; step < 6; ++step) {
          sharded->zero_grad();
          loss_of(model, batch(step, rank)).backward();
          sharded->step();
        }
        EXPECT_EQ(first_difference(copies(model.parameters), whole.parameters), -1)
            << optimizer().name << " rank " << rank << " of " << world << " stage " << static_cast<int>(stage);
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST_P(EveryOptimizer, OnThreeRanksStepsShardsAsItWouldStepWholeParameters) {
  Reference reference(eager_net(), 3, 2);
  const auto plain = optimizer().make(one_group(reference.masters));
  for (int step = 0; step < 4; ++step) {
    reference.gradients(step);
    plain->step();
    reference.publish();
  }
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      const Trainee model = eager_net();
      auto sharded = model.shard(optimizer().make(one_group(model.parameters)), group,
                                 ShardOptions().stage(stage).bucket_bytes(512));
      for (int step = 0; step < 4; ++step) {
        sharded->zero_grad();
        for (int pass = 0; pass < 2; ++pass) loss_of(model, batch(step, pass * 3 + rank)).backward();
        sharded->step();
      }
      EXPECT_EQ(first_difference(copies(model.parameters), copies(reference.masters)), -1)
          << optimizer().name << " rank " << rank << " stage " << static_cast<int>(stage);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

// What the net's parameters compute in under a bf16 policy: batch norm's stay fp32.
std::vector<std::optional<torch::Dtype>> bf16_but_batch_norm(const Net& net) {
  std::vector<std::optional<torch::Dtype>> compute;
  for (const auto& item : net->named_parameters()) {
    const bool whole = item.key().rfind("bn.", 0) == 0;
    compute.push_back(whole ? std::nullopt : std::optional<torch::Dtype>(torch::kBFloat16));
  }
  return compute;
}

TEST(Bf16Policy, EqualsAHandWrittenLoopWithFp32Masters) {
  for (const auto& [world, passes] : std::vector<std::pair<int, int>>{{1, 1}, {1, 3}, {3, 1}, {3, 2}}) {
    Net net;
    fill(net->parameters(), 1);
    Reference reference(trainee_of(net), world, passes, bf16_but_batch_norm(net));
    torch::optim::AdamW plain(reference.masters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int step = 0; step < 4; ++step) {
      reference.gradients(step);
      plain.step();
      reference.publish();
    }
    for (const auto stage : all_stages()) {
      const auto results = run_threads(world, [&, w = world, n = passes](int rank, const Group& group) {
        const Trainee model = eager_net();
        auto sharded = model.shard(
            std::make_unique<torch::optim::AdamW>(model.parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1)),
            group, ShardOptions().stage(stage).mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
        for (int step = 0; step < 4; ++step) {
          sharded->zero_grad();
          for (int pass = 0; pass < n; ++pass) loss_of(model, batch(step, pass * w + rank)).backward();
          sharded->step();
        }
        EXPECT_EQ(first_difference(copies(model.parameters), copies(net->parameters())), -1) << "compute copies";
        Parameters masters;
        for (const auto& item : full_state_dict(*sharded)) masters.push_back(item.value());
        masters.resize(model.parameters.size());  // buffers follow
        EXPECT_EQ(first_difference(masters, copies(reference.masters)), -1)
            << "masters, rank " << rank << " of " << w << " stage " << static_cast<int>(stage);
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

// Two groups with different hyper-parameters, one of them changed on the way.
TEST(ParameterGroups, KeepTheirOwnHyperParameters) {
  const auto make = [](const Parameters& parameters) {
    Groups groups;
    const auto middle = parameters.begin() + static_cast<std::ptrdiff_t>(parameters.size() / 2);
    groups.emplace_back(Parameters(middle, parameters.end()),
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(0)));
    groups.emplace_back(Parameters(parameters.begin(), middle));
    return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-2).weight_decay(0.2));
  };
  Reference reference(eager_net(), 3, 1);
  const auto plain = make(reference.masters);
  for (int step = 0; step < 4; ++step) {
    reference.gradients(step);
    plain->step();
    reference.publish();
    if (step == 1) plain->param_groups()[1].options().set_lr(0.05);
  }
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      const Trainee model = eager_net();
      auto sharded = model.shard(make(model.parameters), group, ShardOptions().stage(stage).bucket_bytes(700));
      ASSERT_EQ(sharded->param_groups().size(), 2u);
      for (int step = 0; step < 4; ++step) {
        sharded->zero_grad();
        loss_of(model, batch(step, rank)).backward();
        sharded->step();
        if (step == 1) sharded->param_groups()[1].options().set_lr(0.05);
      }
      EXPECT_EQ(first_difference(copies(model.parameters), copies(reference.masters)), -1)
          << "rank " << rank << " stage " << static_cast<int>(stage);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(StepWithAClosure, RunsItOnceAndReturnsItsLoss) {
  const auto steps = [](const Trainee& model, auto& optimizer) {
    std::vector<float> losses;
    for (int step = 0; step < 4; ++step) {
      const auto loss = optimizer.step([&] {
        optimizer.zero_grad();
        auto value = loss_of(model, batch(step, 0));
        value.backward();
        return value;
      });
      losses.push_back(loss.template item<float>());
    }
    return losses;
  };
  const Trainee plain = eager_net();
  torch::optim::Adam plain_optimizer(plain.parameters, torch::optim::AdamOptions(1e-2));
  const auto losses = steps(plain, plain_optimizer);
  for (const auto stage : all_stages()) {
    const auto results = run_threads(1, [&](int, const Group& group) {
      const Trainee model = eager_net();
      auto adam = std::make_unique<torch::optim::Adam>(model.parameters, torch::optim::AdamOptions(1e-2));
      auto sharded = model.shard(std::move(adam), group, ShardOptions().stage(stage));
      EXPECT_EQ(steps(model, *sharded), losses);
      EXPECT_EQ(sharded->metrics().steps, 4);
      EXPECT_EQ(first_difference(contents(model), contents(plain)), -1);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

// An optimizer that trueshard has never heard of: the sign of the gradient, with a momentum kept in its own map.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);

 public:
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }
};
struct SignOfGradient : torch::optim::Optimizer {
  explicit SignOfGradient(const Parameters& parameters, double lr)
      : torch::optim::Optimizer(one_group(parameters), std::make_unique<SignOptions>(lr)) {}
  torch::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (auto& p : group.params()) {
        if (p.grad().defined()) p.add_(p.grad().sign(), -group.options().get_lr());
      }
    }
    return {};
  }
};

TEST(UnknownOptimizers, WorkWhenTheCallerVouchesForThem) {
  Reference reference(eager_net(), 3, 1);
  SignOfGradient plain(reference.masters, 1e-2);
  for (int step = 0; step < 3; ++step) {
    reference.gradients(step);
    plain.step();
    reference.publish();
  }
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      const Trainee model = eager_net();
      auto sharded = model.shard(std::make_unique<SignOfGradient>(model.parameters, 1e-2), group,
                                 ShardOptions().stage(stage).assume_elementwise(true));
      for (int step = 0; step < 3; ++step) {
        sharded->zero_grad();
        loss_of(model, batch(step, rank)).backward();
        sharded->step();
      }
      EXPECT_EQ(first_difference(copies(model.parameters), copies(reference.masters)), -1);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(UnknownOptimizers, AreRefusedByNameAndLeaveTheModuleAlone) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    const Trainee model = eager_net();
    const auto before = contents(model);
    EXPECT_THAT(error_of([&] { model.shard(std::make_unique<SignOfGradient>(model.parameters, 1e-2), group, {}); }),
                AllOf(HasSubstr("SignOfGradient"), HasSubstr("assume_elementwise(true)")));
    EXPECT_THAT(error_of([&] {
                  model.shard(std::make_unique<torch::optim::LBFGS>(model.parameters), group,
                              ShardOptions().assume_elementwise(true));
                }),
                AllOf(HasSubstr("LBFGS"), HasSubstr("not element-wise")));
    EXPECT_EQ(first_difference(contents(model), before), -1);
    torch::optim::SGD plain(model.parameters, 0.1);
    loss_of(model, batch(0, 0)).backward();
    plain.step();
    EXPECT_NE(first_difference(contents(model), before), -1);
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
