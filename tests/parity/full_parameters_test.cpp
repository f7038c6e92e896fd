// SPDX-License-Identifier: BSD-3-Clause
// Whole parameters: the guard, the state dictionary, and the identity of the module's own tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/parity/nets.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const float kNotBf16 = 1.0f + 1.0f / 2048;  // a master that bf16 cannot show

ShardOptions mixed(Stage stage) {
  return ShardOptions().stage(stage).mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
}
std::unique_ptr<ShardedOptimizer> shard_sgd(Toy& module, double lr, const Group& group, const ShardOptions& options) {
  return shard(*module, torch::optim::SGD(module->parameters(), lr), group, options);
}
void step_with(Toy& module, ShardedOptimizer& optimizer, const std::vector<std::vector<float>>& gradients) {
  optimizer.zero_grad();
  backward_with(module, gradients);
  optimizer.step();
}
void write(torch::Tensor tensor, float value) {
  const torch::NoGradGuard no_grad;
  tensor.fill_(value);
}
Toy five_and_two() { return toy({std::vector<float>(5, kNotBf16), {2.0f, 3.0f}}); }

TEST(FullParametersGuard, ShowsFp32MastersAndGivesTheComputeCopiesBack) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      Toy module = five_and_two();
      auto optimizer = shard_sgd(module, 0.5, group, mixed(stage));
      const auto copy = module->tensors[0].detach().clone();
      EXPECT_EQ(copy.scalar_type(), torch::kBFloat16);
      {
        FullParametersGuard full(*optimizer);
        EXPECT_EQ(module->tensors[0].scalar_type(), torch::kFloat);
        EXPECT_TRUE(same_bits(module->tensors[0], torch::full({5}, kNotBf16)));
        FullParametersGuard nested(*optimizer);
        EXPECT_EQ(module->tensors[1].scalar_type(), torch::kFloat);
      }
      EXPECT_TRUE(same_bits(module->tensors[0], copy));
      EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, kNotBf16))) << "no low bit is lost";
      step_with(module, *optimizer, {std::vector<float>(5, 1.0f), {1.0f, 1.0f}});
      EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, kNotBf16 - 0.5f)));
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FullParametersGuard, WritesPersistWithAllTheirBits) {
  for (const auto stage : all_stages()) {
    for (const bool replace : {false, true}) {
      const auto results = run_threads(3, [&](int, const Group& group) {
        Toy module = toy({std::vector<float>(5, 9.0f), {2.0f, 3.0f}});
        auto optimizer = shard_sgd(module, 0.5, group, mixed(stage));
        {
          FullParametersGuard full(*optimizer);
          if (replace) {
            module->tensors[0].set_data(torch::full({5}, kNotBf16));
          } else {
            write(module->tensors[0], kNotBf16);
          }
        }
        EXPECT_TRUE(same_bits(module->tensors[0], torch::full({5}, 1.0f).to(torch::kBFloat16)));
        EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, kNotBf16)));
        step_with(module, *optimizer, {std::vector<float>(5, 1.0f), {0.0f, 0.0f}});
        EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, kNotBf16 - 0.5f)));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(FullParametersGuard, WorksOnAModuleWithoutAPolicyToo) {
  for (const auto stage : all_stages()) {
    for (const bool replace : {false, true}) {
      const auto results = run_threads(3, [&](int, const Group& group) {
        Toy module = five_and_two();
        auto optimizer = shard_sgd(module, 0.5, group, ShardOptions().stage(stage));
        {
          FullParametersGuard full(*optimizer);
          if (replace) {
            module->tensors[0].set_data(torch::full({5}, 4.0f));
          } else {
            write(module->tensors[0], 4.0f);
          }
        }
        step_with(module, *optimizer, {std::vector<float>(5, 1.0f), {1.0f, 1.0f}});
        EXPECT_TRUE(same_bits(module->tensors[0], torch::full({5}, 3.5f)));
        EXPECT_TRUE(same_bits(module->tensors[1], torch::tensor({1.5f, 2.5f})));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(FullParametersGuard, DifferingWritesAreAnErrorOnAllRanksAndBroadcastHealsThem) {
  for (const auto stage : all_stages()) {
    for (const bool heal : {false, true}) {
      const auto results = run_threads(3, [&](int rank, const Group& group) {
        Toy module = five_and_two();
        auto optimizer = shard_sgd(module, 0.5, group, mixed(stage));
        {
          FullParametersGuard full(*optimizer);
          write(module->tensors[0], 10.0f + kNotBf16 * static_cast<float>(rank));
          if (heal) full.broadcast(2);
        }
        if (!heal) {
          backward_with(module, {std::vector<float>(5, 1.0f), {1.0f, 1.0f}});
          EXPECT_THAT(error_of([&] { optimizer->step(); }),
                      AllOf(HasSubstr("changed outside"), HasSubstr("broadcast()")));
          return;
        }
        EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, 10.0f + kNotBf16 * 2.0f)));
        step_with(module, *optimizer, {std::vector<float>(5, 1.0f), {1.0f, 1.0f}});
        EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, 10.0f + kNotBf16 * 2.0f - 0.5f)));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(FullParametersGuard, AnErrorAfterDifferingWritesIsHealedByAnotherGuard) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Toy module = five_and_two();
    auto optimizer = shard_sgd(module, 0.5, group, mixed(Stage::Zero2));
    {
      FullParametersGuard full(*optimizer);
      write(module->tensors[0], static_cast<float>(rank));
    }
    EXPECT_THAT(error_of([&] { full_state_dict(*optimizer); }), HasSubstr("broadcast()"));
    optimizer->zero_grad();
    {
      FullParametersGuard full(*optimizer);
      full.broadcast(1);
    }
    EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::ones({5})));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// It can be taken back: nothing was written to the masters.
TEST(FullParametersGuard, ACastOrANewShapeUnderItIsAnErrorOnAllRanks) {
  for (const auto stage : all_stages()) {
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      Toy module = five_and_two();
      auto optimizer = shard_sgd(module, 0.5, group, mixed(stage));
      {
        FullParametersGuard full(*optimizer);
        if (rank == 1) module->tensors[0].set_data(torch::zeros({5}, torch::kHalf));
        if (rank == 2) module->tensors[1].set_data(torch::zeros({9}));
      }
      EXPECT_THAT(error_of([&] { full_state_dict(*optimizer); }),
                  AllOf(HasSubstr("rank 1"), HasSubstr("'p0' is Half")));
      optimizer->zero_grad();
      if (rank == 1) module->tensors[0].set_data(torch::ones({5}, torch::kBFloat16));
      if (rank == 2) module->tensors[1].set_data(torch::tensor({2.0f, 3.0f}).to(torch::kBFloat16));
      {
        FullParametersGuard full(*optimizer);
        full.broadcast(0);
      }
      EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p1"], torch::tensor({2.0f, 3.0f})));
      EXPECT_TRUE(same_bits(module->tensors[0], torch::ones({5}, torch::kBFloat16)));
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(FullParametersGuard, MayNotSpanAStep) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Toy module = five_and_two();
    auto optimizer = shard_sgd(module, 0.5, group, mixed(Stage::Zero1));
    backward_with(module, {std::vector<float>(5, 1.0f), {1.0f, 1.0f}});
    {
      FullParametersGuard full(*optimizer);
      EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("FullParametersGuard is alive"));
      EXPECT_THAT(error_of([&] { full_state_dict(*optimizer); }), HasSubstr("FullParametersGuard is alive"));
    }
    optimizer->step();
    EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], torch::full({5}, kNotBf16 - 0.5f)));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Identity, OfParametersAndTheirStoragesIsUntouched) {
  for (const auto stage : all_stages()) {
    for (const bool policy : {false, true}) {
      const auto results = run_threads(3, [&](int rank, const Group& group) {
        Net net;
        fill(net->parameters(), 1);
        const Trainee model = trainee_of(net);
        std::vector<const void*> before, after;
        const auto identities = [&](std::vector<const void*>& list) {
          for (const auto& p : net->parameters()) {
            list.push_back(p.unsafeGetTensorImpl());
            list.push_back(p.storage().unsafeGetStorageImpl());
          }
          for (const auto& b : net->buffers()) list.push_back(b.const_data_ptr());
        };
        identities(before);
        auto sharded = model.shard(std::make_unique<torch::optim::AdamW>(model.parameters), group,
                                   policy ? mixed(stage) : ShardOptions().stage(stage));
        for (int step = 0; step < 2; ++step) {
          sharded->zero_grad();
          loss_of(model, batch(step, rank)).backward();
          sharded->step();
          const FullParametersGuard full(*sharded);
        }
        identities(after);
        EXPECT_EQ(before, after);
        sharded.reset();  // and the module outlives the optimizer
        std::vector<const void*> last;
        identities(last);
        EXPECT_EQ(before, last);
        EXPECT_TRUE(std::isfinite(loss_of(model, batch(9, rank)).item<float>()));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

struct TiedImpl : torch::nn::Module {
  torch::Tensor weight;
  torch::nn::Linear middle{nullptr};
  TiedImpl() {
    weight = register_parameter("table", torch::full({3, 2}, kNotBf16));
    middle = register_module("middle", torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(false)));
    register_parameter("head", weight);
    register_parameter("double", torch::full({2}, 0.1, torch::kDouble));
    register_parameter("empty", torch::empty({0, 4}));
    register_buffer("ids", torch::tensor({int64_t{4097}}));
    register_buffer("half", torch::full({2}, 0.5, torch::kHalf));
    register_buffer("tied ids", named_buffers()["ids"]);
  }
};
TORCH_MODULE(Tied);

TEST(FullStateDict, HoldsTheUntouchedModulesNamesShapesAndDtypes) {
  for (const auto stage : all_stages()) {
    for (const bool policy : {false, true}) {
      const auto results = run_threads(3, [&](int rank, const Group& group) {
        Tied net;
        std::map<std::string, std::string> expected, got;
        const auto describe = [](const torch::Tensor& tensor) {
          std::ostringstream text;
          text << tensor.dtype() << ' ' << tensor.sizes();
          return text.str();
        };
        for (const auto& item : net->named_parameters()) expected[item.key()] = describe(item.value());
        for (const auto& item : net->named_buffers()) expected[item.key()] = describe(item.value());
        auto optimizer = shard(*net, torch::optim::SGD(net->parameters(), 0.5), group,
                               policy ? mixed(stage) : ShardOptions().stage(stage));
        net->weight.sum().backward();
        const auto state = full_state_dict(*optimizer);
        for (const auto& item : state) got[item.key()] = describe(item.value());
        EXPECT_EQ(got, expected);
        EXPECT_TRUE(state["table"].is_same(state["head"]));
        EXPECT_TRUE(state["ids"].is_same(state["tied ids"]));
        EXPECT_TRUE(same_bits(state["table"], torch::full({3, 2}, kNotBf16)));
        EXPECT_TRUE(same_bits(state["double"], torch::full({2}, 0.1, torch::kDouble)));
        EXPECT_FALSE(state["table"].requires_grad());
        const auto on_zero = full_state_dict(*optimizer, /*rank0_only=*/true);
        EXPECT_EQ(on_zero.size(), rank == 0 ? state.size() : 0u);
        state["table"].zero_();  // copies: the optimizer does not see this, and its gradients are still there
        optimizer->step();
        EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["head"], torch::full({3, 2}, kNotBf16 - 0.5f)));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

TEST(FullStateDict, OfATorchScriptModuleHasItsNames) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    auto module = script_module();
    Parameters parameters;
    for (const auto& p : module.parameters()) parameters.push_back(p);
    auto optimizer = shard(module, torch::optim::SGD(parameters, 0.5), group, mixed(Stage::Zero2));
    const auto state = full_state_dict(*optimizer);
    size_t count = 0;
    for (const auto& item : module.named_parameters()) {
      ASSERT_TRUE(state.contains(item.name)) << item.name;
      EXPECT_EQ(state[item.name].sizes(), item.value.sizes());
      EXPECT_EQ(state[item.name].scalar_type(), torch::kFloat);
      ++count;
    }
    EXPECT_EQ(state["norm.calls"].scalar_type(), torch::kLong);
    EXPECT_EQ(state.size(), count + 1);
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
