// SPDX-License-Identifier: BSD-3-Clause
// fp32 masters and what the module shows of them (docs/numerics.md, section 6; field cases 17, 18 and 19).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "tests/parity/nets.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const MixedPrecisionPolicy kBf16 = MixedPrecisionPolicy().param_dtype(torch::kBFloat16);

std::unique_ptr<ShardedOptimizer> shard_sgd(Toy& module, double lr, const Group& group, const ShardOptions& options) {
  return shard(*module, torch::optim::SGD(module->parameters(), lr), group, options);
}
void step_with(Toy& module, ShardedOptimizer& optimizer, const std::vector<std::vector<float>>& gradients) {
  optimizer.zero_grad();
  backward_with(module, gradients);
  optimizer.step();
}
std::vector<float> values_of(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().clone().to(torch::kFloat).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

// ---- field case 17 -------------------------------------------------------------------------------------------------

struct SmallSteps {
  double master = 0, shown = 0;
};
// A bf16 1.0 in the middle of other parameters, trained with a constant gradient.
template <typename Optimizer>
SmallSteps small_steps(const ShardOptions& options, const Optimizer& make, float gradient, int steps) {
  SmallSteps result;
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = toy({{1.0f, 1.0f, 1.0f, 1.0f, 1.0f}, {1.0f}}, torch::kBFloat16);
    auto optimizer = shard(*module, make(module->parameters()), group, options);
    for (int i = 0; i < steps; ++i) step_with(module, *optimizer, {std::vector<float>(5, gradient), {gradient}});
    const auto state = full_state_dict(*optimizer);
    EXPECT_TRUE(state["p0"].eq(state["p1"].item()).all().item().toBool()) << "all elements went the same way";
    EXPECT_TRUE(module->tensors[0].eq(module->tensors[1].item()).all().item().toBool());
    if (rank == 0) result = {state["p1"].item().toDouble(), module->tensors[1].item().toDouble()};
  });
  EXPECT_TRUE(results.ok()) << results;
  return result;
}
const auto make_sgd = [](const Parameters& p) { return torch::optim::SGD(p, 1e-3); };
const auto make_adamw = [](const Parameters& p) {
  return torch::optim::AdamW(p, torch::optim::AdamWOptions(6e-4).weight_decay(0.01));
};

TEST(FieldCase17, SmallUpdatesReachTheMasterAndThenTheWeight) {
  for (const auto stage : all_stages()) {
    const auto options = ShardOptions().stage(stage);
    const auto sgd = small_steps(options, make_sgd, 1.0f, 100);
    EXPECT_NEAR(sgd.master, 0.9, 1e-5);
    EXPECT_EQ(sgd.shown, 0.8984375);
    const auto adamw = small_steps(options, make_adamw, 1.0f, 100);
    EXPECT_NEAR(adamw.master, 0.93942, 1e-5);
    EXPECT_EQ(adamw.shown, 0.9375);
  }
}

TEST(FieldCase17, WeightDecayAloneMovesTheWeight) {
  const auto make = [](const Parameters& p) {
    return torch::optim::AdamW(p, torch::optim::AdamWOptions(1e-2).weight_decay(0.01));
  };
  EXPECT_NEAR(small_steps(ShardOptions(), make, 0.0f, 1000).master, std::pow(1 - 1e-4, 1000), 1e-4);
}

TEST(FieldCase17, WithoutMastersOnlyOnRequestAndThenNothingMoves) {
  for (const auto stage : all_stages()) {
    const auto options = ShardOptions().stage(stage).low_precision_master(true);
    for (const auto& lost : {small_steps(options, make_sgd, 1.0f, 100), small_steps(options, make_adamw, 1.0f, 100)}) {
      EXPECT_EQ(lost.master, 1.0);
      EXPECT_EQ(lost.shown, 1.0);
    }
  }
}

TEST(FieldCase17, TheLogSaysOnceWhatTheMastersCost) {
  const auto log_of = [](torch::Dtype dtype, const ShardOptions& options) {
    ::testing::internal::CaptureStderr();
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy({std::vector<float>(250, 1.0f), {1.0f, 2.0f, 3.0f}}, dtype);
      auto optimizer = shard_sgd(module, 0.1, group, options);
      for (int i = 0; i < 3; ++i) step_with(module, *optimizer, {std::vector<float>(250, 1.0f), {1.0f, 1.0f, 1.0f}});
    });
    const auto text = ::testing::internal::GetCapturedStderr();
    EXPECT_TRUE(results.ok()) << results;
    return text;
  };
  const auto text = log_of(torch::kBFloat16, {});
  EXPECT_THAT(text, AllOf(HasSubstr("2 parameters are 16-bit"), HasSubstr("'p0'"), HasSubstr("1012 bytes"),
                          HasSubstr("low_precision_master")));
  EXPECT_EQ(text.find("fp32 masters"), text.rfind("fp32 masters")) << "said more than once:\n" << text;
  EXPECT_THAT(log_of(torch::kFloat, {}), Not(HasSubstr("masters")));
  EXPECT_THAT(log_of(torch::kBFloat16, ShardOptions().low_precision_master(true)), Not(HasSubstr("masters")));
}

TEST(MasterWeights, APolicyAndLowPrecisionMastersTogetherAreRefused) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f}});
    const auto options = ShardOptions().mp_policy(kBf16).low_precision_master(true);
    EXPECT_THAT(error_of([&] { shard_sgd(module, 0.1, group, options); }), HasSubstr("Choose one of the two"));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// ---- field case 18 -------------------------------------------------------------------------------------------------

struct NormedImpl : torch::nn::Module {
  torch::nn::BatchNorm1d bn{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::Tensor counter, table;
  NormedImpl() {
    bn = register_module("bn", torch::nn::BatchNorm1d(3));
    linear = register_module("linear", torch::nn::Linear(3, 2));
    counter = register_buffer("counter", torch::full({1}, 4097, torch::kLong));
    table = register_buffer("table", torch::full({2}, 0.1f));
    fill(parameters(), 5);
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear->forward(bn->forward(x).to(linear->weight.dtype())); }
};
TORCH_MODULE(Normed);

torch::Tensor normed_batch(int64_t step, int64_t leaf) {
  return random_values(10 * step + leaf, {8, 3}).to(torch::kBFloat16);
}

TEST(FieldCase18, BuffersAndBatchNormKeepTheirDtypeInTrainingAndInSaves) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(2, [&](int rank, const Group& group) {
      Normed net, reference;  // the reference sees the same batches, in fp32
      auto optimizer =
          shard(*net, torch::optim::SGD(net->parameters(), 0.01), group, ShardOptions().stage(stage).mp_policy(kBf16));
      EXPECT_EQ(net->linear->weight.scalar_type(), torch::kBFloat16);
      for (int64_t step = 0; step < 5; ++step) {
        optimizer->zero_grad();
        net->forward(normed_batch(step, rank)).to(torch::kFloat).square().mean().backward();
        optimizer->step();
        reference->forward(normed_batch(step, rank).to(torch::kFloat));
      }
      EXPECT_TRUE(torch::allclose(net->bn->running_mean, reference->bn->running_mean, 1e-6, 0.0));
      EXPECT_TRUE(torch::allclose(net->bn->running_var, reference->bn->running_var, 1e-6, 0.0));
      const auto state = full_state_dict(*optimizer);
      for (const auto& name :
           {"bn.weight", "bn.bias", "linear.weight", "linear.bias", "bn.running_mean", "bn.running_var", "table"})
        EXPECT_EQ(state[name].scalar_type(), torch::kFloat) << name;
      EXPECT_EQ(state["bn.num_batches_tracked"].scalar_type(), torch::kLong);
      EXPECT_EQ(state["bn.num_batches_tracked"].item<int64_t>(), 5);
      EXPECT_EQ(state["counter"].item<int64_t>(), 4097);
      EXPECT_EQ(state["table"][0].item<float>(), 0.1f);
      Normed plain;  // a reload is bit-equal, and what the module computes with is the rounding of the save
      const torch::NoGradGuard no_grad;
      for (auto& item : plain->named_parameters()) item.value().copy_(state[item.key()]);
      for (const auto& item : plain->named_parameters()) EXPECT_TRUE(same_bits(item.value(), state[item.key()]));
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(same_bits(item.value(), state[item.key()].to(item.value().scalar_type()))) << item.key();
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FieldCase18, ModulesThatAreNamedKeepTheirDtype) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Net net;
    auto policy = MixedPrecisionPolicy().param_dtype(torch::kBFloat16).full_precision_modules({"norm", "head"});
    auto optimizer = shard(*net, torch::optim::SGD(net->parameters(), 0.1), group, ShardOptions().mp_policy(policy));
    EXPECT_EQ(net->norm->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(net->head->bias.scalar_type(), torch::kFloat);
    EXPECT_EQ(net->bn->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(net->up->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(net->embed->weight.scalar_type(), torch::kBFloat16);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// ---- field case 19 -------------------------------------------------------------------------------------------------

enum class Load { kCopy, kSetData, kArchive };

void load(Toy& module, const std::vector<float>& values, Load how) {
  const auto dtype = module->tensors[0].scalar_type();
  const torch::NoGradGuard no_grad;
  if (how == Load::kCopy) module->tensors[0].copy_(torch::tensor(values));
  if (how == Load::kSetData) module->tensors[0].set_data(torch::tensor(values).to(dtype));
  if (how == Load::kArchive) {  // a file with the module's own dtype
    std::stringstream file;
    torch::save(toy({values}, dtype), file);
    torch::load(module, file);
  }
}

TEST(FieldCase19, WeightsLoadedAfterShardAreTheOnesThatStep) {
  for (const auto how : {Load::kCopy, Load::kSetData, Load::kArchive}) {
    for (const auto stage : all_stages()) {
      for (const bool mixed : {false, true}) {
        const auto results = run_threads(3, [&](int, const Group& group) {
          Toy module = toy({{5.0f, 6.0f}});
          auto options = ShardOptions().stage(stage);
          if (mixed) options.mp_policy(kBf16);
          auto optimizer = shard_sgd(module, 0.1, group, options);
          step_with(module, *optimizer, {{3.0f, 3.0f}});
          load(module, {1.0f, 2.0f}, how);
          step_with(module, *optimizer, {{1.0f, 1.0f}});
          const auto shown = torch::tensor({1.0f - 0.1f, 2.0f - 0.1f});
          EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], shown)) << static_cast<int>(how);
          EXPECT_TRUE(same_bits(module->tensors[0], shown.to(module->tensors[0].scalar_type())));
          step_with(module, *optimizer, {{1.0f, 1.0f}});  // and it stays connected
          EXPECT_EQ(values_of(full_state_dict(*optimizer)["p0"])[0], 0.9f - 0.1f);
        });
        ASSERT_TRUE(results.ok()) << results;
      }
    }
  }
}

// What set_data() brings may be a part of a larger tensor, in another memory order, and shared with other modules
// (here: those of the other ranks): only the values are taken.
TEST(FieldCase19, LoadedTensorsMayBeSharedPartsInAnyMemoryOrder) {
  for (const auto stage : all_stages()) {
    const auto loaded = random_values(1, {30});
    const auto untouched = loaded.clone();
    const auto start = random_values(2, {3, 4}), gradient = random_values(3, {3, 4});
    auto plain = start.clone().requires_grad_();
    torch::optim::Adam plain_optimizer({plain}, torch::optim::AdamOptions(0.1));
    const auto plain_step = [&] {
      plain.mutable_grad() = gradient.clone();
      plain_optimizer.step();
    };
    plain_step();
    plain.set_data(loaded.narrow(0, 6, 12).view({4, 3}).t().contiguous());
    plain_step();
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module(Parameters{start, start});
      auto optimizer = shard(*module, torch::optim::Adam(module->parameters(), torch::optim::AdamOptions(0.1)), group,
                             ShardOptions().stage(stage).gradient_divide_factor(1.0));
      const auto step = [&] {
        optimizer->zero_grad();
        const auto mine = group->getRank() == 0 ? gradient : torch::zeros({3, 4});
        backward_with(module->parameters(), {mine, mine});
        optimizer->step();
      };
      step();
      module->tensors[0].set_data(loaded.narrow(0, 6, 12).view({4, 3}).t());
      module->tensors[1].set_data(loaded.narrow(0, 6, 12).view({4, 3}).t());
      step();
      EXPECT_TRUE(same_bits(module->tensors[0], plain)) << "stage " << static_cast<int>(stage);
      EXPECT_TRUE(same_bits(module->tensors[1], plain));
      EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], plain));
    });
    ASSERT_TRUE(results.ok()) << results;
    EXPECT_TRUE(same_bits(loaded, untouched));
  }
}

// libtorch itself refuses a gradient of another shape, but not when the dtype is another one too.
TEST(FieldCase19, AnotherShapeAfterShardIsAnErrorOnAllRanks) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      Toy module = toy({{1.0f, 2.0f}, {3.0f}});
      auto optimizer = shard_sgd(module, 0.5, group, ShardOptions().stage(stage));
      for (const auto dtype : {torch::kFloat, torch::kDouble}) {
        if (rank == 1) module->tensors[0].set_data(torch::ones({900}, dtype));
        const auto wrong = std::string("'p0' is ") + (dtype == torch::kFloat ? "Float" : "Double") + " [900]";
        EXPECT_THAT(error_of([&] { full_state_dict(*optimizer); }), AllOf(HasSubstr("rank 1"), HasSubstr(wrong)));
        optimizer->zero_grad();
      }
      const auto text = error_of([&] {
        backward_with(module->tensors, {torch::ones_like(module->tensors[0]), torch::ones({1})});
        optimizer->step();
      });
      EXPECT_THAT(text, AllOf(HasSubstr("rank 1"), HasSubstr("'p0' is [900]"), HasSubstr("[2]")));
      EXPECT_EQ(module->tensors[1].item<float>(), 3.0f);
      optimizer->zero_grad();
      if (rank == 1) module->tensors[0].set_data(torch::tensor({1.0f, 2.0f}));
      FullParametersGuard(*optimizer).broadcast(1);
      step_with(module, *optimizer, {{1.0f, 1.0f}, {1.0f}});
      EXPECT_EQ(values_of(module->tensors[0]), (std::vector<float>{0.5f, 1.5f}));
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FieldCase19, WeightsLoadedBetweenTheClipAndTheStepAreKept) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{5.0f, 6.0f}});
    auto optimizer = shard_sgd(module, 0.5, group, ShardOptions().mp_policy(kBf16));
    optimizer->zero_grad();
    backward_with(module, {{1.0f, 1.0f}});
    clip_grad_norm_(*optimizer, 100.0);
    load(module, {1.0f, 2.0f}, Load::kCopy);
    optimizer->step();
    EXPECT_EQ(values_of(full_state_dict(*optimizer)["p0"]), (std::vector<float>{0.5f, 1.5f}));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(FieldCase19, DifferentLoadsAreAnErrorOnAllRanks) {
  for (const auto how : {Load::kCopy, Load::kSetData}) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      Toy module = toy({{5.0f, 6.0f}});
      auto optimizer = shard_sgd(module, 0.5, group, {});
      load(module, {rank == 1 ? 7.0f : 1.0f, 2.0f}, how);
      backward_with(module, {{1.0f, 1.0f}});
      EXPECT_THAT(error_of([&] { optimizer->step(); }), AllOf(HasSubstr("changed outside"), HasSubstr("rank 1")));
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FieldCase19, ACastAfterShardSaysWhatToDoAndCanBeTakenBack) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = toy({{1.0f, 2.0f}});
      auto optimizer = shard_sgd(module, 0.5, group, ShardOptions().stage(stage));
      module->to(torch::kBFloat16);
      const auto text = error_of([&] { step_with(module, *optimizer, {{1.0f, 1.0f}}); });
      EXPECT_THAT(text, AllOf(HasSubstr("'p0' is BFloat16"), HasSubstr("call shard() after .to(dtype)"),
                              HasSubstr("MixedPrecisionPolicy().param_dtype()")));
      module->to(torch::kFloat);
      step_with(module, *optimizer, {{1.0f, 1.0f}});
      EXPECT_EQ(values_of(module->tensors[0]), (std::vector<float>{0.5f, 1.5f}));
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FieldCase19, ACastBeforeShardStillStepsInFp32) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = toy({{1.0f, 2.0f}});
    torch::optim::SGD made_before(module->parameters(), 1e-3);
    module->to(torch::kBFloat16);
    auto optimizer = shard(*module, std::move(made_before), group);
    step_with(module, *optimizer, {{1.0f, 1.0f}});
    EXPECT_EQ(values_of(full_state_dict(*optimizer)["p0"]), (std::vector<float>{1.0f - 1e-3f, 2.0f - 1e-3f}));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(FieldCase19, AForwardBeforeShardChangesNothing) {
  for (const bool keep_graph : {false, true}) {
    for (const bool mixed : {false, true}) {
      const auto results = run_threads(3, [&](int, const Group& group) {
        Toy module = toy({{1.0f, 2.0f}});
        auto graph = (module->tensors[0] * 3).sum();
        if (!keep_graph) graph = torch::Tensor();
        auto options = ShardOptions();
        if (mixed) options.mp_policy(kBf16);
        auto optimizer = shard_sgd(module, 0.5, group, options);
        step_with(module, *optimizer, {{1.0f, 1.0f}});
        step_with(module, *optimizer, {{1.0f, 1.0f}});
        EXPECT_EQ(values_of(module->tensors[0]), (std::vector<float>{0.0f, 1.0f})) << keep_graph << mixed;
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

}  // namespace
}  // namespace trueshard::testing
