// SPDX-License-Identifier: BSD-3-Clause
// What a save holds, and where it may go: any number of ranks, any stage, a plain module. Field cases 18 to 23.
#include <gmock/gmock.h>

#include <torch/optim.h>

#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/safetensors.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/training.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

using ::testing::HasSubstr;

std::vector<torch::Tensor> odd_values() {
  return {random_values(1, {10}),       random_values(2, {3}),
          random_values(3, {1}),        random_values(4, {7, 5}),
          random_values(5, {0, 4}),     random_values(6, {4, 3, 3, 2}).to(torch::MemoryFormat::ChannelsLast),
          random_values(7, {40, 9}).t()};
}

// A toy with every kind of shape, its Adam, and steps whose gradients do not depend on the number of ranks.
struct ToyRun {
  Toy module;
  std::unique_ptr<ShardedOptimizer> optimizer;
  CheckpointState state;
  ToyRun(const Group& group, int stage, bool zero = false) : module(make(zero)) {
    torch::optim::Adam adam(module->parameters(), torch::optim::AdamOptions(1e-2).amsgrad(true));
    optimizer = shard(*module, std::move(adam), group,
                      ShardOptions().stage(static_cast<Stage>(stage)).bucket_bytes(300).gradient_divide_factor(12.0));
    state.add("trainer", *optimizer);
  }
  static Toy make(bool zero) {
    auto values = odd_values();
    if (zero) {
      for (auto& value : values) value = torch::zeros_like(value);
    }
    return toy_of(values);
  }
  void step(int64_t number) {
    optimizer->zero_grad();
    const auto& group = optimizer->group();
    for (int64_t leaf = group->getRank(); leaf < 12; leaf += group->getSize()) {
      std::vector<torch::Tensor> gradients;
      for (size_t i = 0; i < module->tensors.size(); ++i)
        gradients.push_back(
            random_values(1000 * number + 20 * leaf + static_cast<int64_t>(i), module->tensors[i].sizes()));
      gradients[1] = number == 2 ? torch::Tensor() : gradients[1];  // one parameter has fewer steps than the others
      backward_with(module->tensors, gradients);
    }
    optimizer->step();
  }
  uint64_t weights() {
    const FullParametersGuard whole(*optimizer);
    return digest(module->tensors);
  }
};

std::string saved_bytes(const std::string& folder) {
  return read_bytes(folder + "/model.safetensors") + read_bytes(folder + "/optimizer.safetensors");
}

// Field case 21.
TEST(FieldCase21, ASaveIsTheSameBytesForEveryNumberOfRanksAndStage) {
  const TemporaryFolder folder;
  std::string first;
  for (const auto& [world, stage] : {std::pair(1, 0), {2, 1}, {3, 2}, {4, 0}, {4, 3}, {6, 1}}) {
    const auto results = run_threads(world, [&, stage = stage](int, const Group& group) {
      ToyRun run(group, stage);
      for (int i = 0; i < 3; ++i) run.step(i);
      save_checkpoint(folder / "c", run.state, CheckpointOptions().staging_bytes(100));
    });
    ASSERT_TRUE(results.ok()) << results;
    const auto bytes = saved_bytes(folder / "c");
    if (first.empty()) first = bytes;
    EXPECT_TRUE(bytes == first) << world << " ranks, stage " << stage;
  }
}

TEST(FieldCase21, AnySaveLoadsOnAnyNumberOfRanksAndGoesOnWithTheSameBits) {
  const TemporaryFolder folder;
  std::vector<std::string> expected;
  for (const int from : {1, 4}) {
    auto results = run_threads(from, [&](int, const Group& group) {
      ToyRun run(group, 2);
      for (int i = 0; i < 3; ++i) run.step(i);
      save_checkpoint(folder / std::to_string(from), run.state);
      const auto at_save = run.weights();
      run.step(3);
      return std::to_string(at_save) + " " + std::to_string(run.weights());
    });
    ASSERT_TRUE(results.ok()) << results;
    for (const int to : {1, 2, 3, 4}) {
      for (const int stage : {0, 1, 2, 3}) {
        const auto resumed = run_threads(to, [&](int, const Group& group) {
          ToyRun run(group, stage, true);
          load_checkpoint(folder / std::to_string(from), run.state);
          const auto loaded = run.weights();
          run.step(3);
          return std::to_string(loaded) + " " + std::to_string(run.weights());
        });
        ASSERT_TRUE(resumed.ok()) << resumed;
        for (const auto& each : resumed)
          EXPECT_EQ(each.report, results[0].report) << from << " -> " << to << " stage " << stage;
      }
    }
  }
}

// Field case 20, first half: names, shapes and values are the untouched module's; the weights load into it alone.
TEST(FieldCase20, AFreshPlainModuleGivesTheSameOutputs) {
  const TemporaryFolder folder;
  std::vector<std::string> digests(3);
  const auto results = run_processes(3, [&](int, const Group& group) {
    TrainingRun run(group, ShardOptions().stage(Stage::Zero2));
    for (int i = 0; i < 5; ++i) run.one_step();
    save_checkpoint(folder / "c", run.state);
    const FullParametersGuard whole(*run.optimizer);
    run.net->eval();
    return std::to_string(digest({run.net(batch_of(9, 9))}));
  });
  ASSERT_TRUE(results.ok()) << results;
  torch::manual_seed(5);
  SmallNet plain;
  CheckpointState state;
  state.add("trainer", *plain);
  load_checkpoint(folder / "c", state, LoadOptions().allow_unexpected({"scaler", "step", "schedule"}));
  plain->eval();
  EXPECT_EQ(std::to_string(digest({plain(batch_of(9, 9))})), results[0].report);
  const auto file = checkpoint::open_regular(folder / "c/model.safetensors");
  const auto header = checkpoint::read_header(file);
  size_t count = 0;
  for (const auto& item : plain->named_parameters()) {
    ++count;
    ASSERT_NE(header.find(item.key()), nullptr) << item.key();
    EXPECT_EQ(header.find(item.key())->shape, item.value().sizes().vec());
    EXPECT_EQ(header.find(item.key())->dtype, checkpoint::Dtype::kF32);
  }
  for (const auto& item : plain->named_buffers()) count += header.find(item.key()) != nullptr;
  EXPECT_EQ(header.tensors.size(), count);
}

// Field case 18.
TEST(FieldCase18, BuffersKeepTheirDtypeAndMastersAreWhole) {
  struct MixedImpl : torch::nn::Module {
    torch::nn::BatchNorm1d norm{nullptr};
    torch::Tensor counter, weight;
    MixedImpl() {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
      weight = register_parameter("weight", torch::full({33}, 1.0f + std::ldexp(1.0f, -20)));
      counter = register_buffer("counter", torch::full({2}, 4097, torch::kLong));
    }
  };
  const TemporaryFolder folder;
  const auto results = run_threads(2, [&](int rank, const Group& group) {
    const auto make = [&] {
      auto module = std::make_shared<MixedImpl>();
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group,
                             ShardOptions().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
      return std::pair(module, std::move(optimizer));
    };
    auto [module, optimizer] = make();
    module->norm(random_values(rank, {6, 5}));  // each rank has statistics of its own
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
    auto [other, other_optimizer] = make();
    other->counter.zero_();
    CheckpointState other_state;
    other_state.add("trainer", *other_optimizer);
    load_checkpoint(folder / "c", other_state);
    EXPECT_TRUE(same_bits(other->norm->running_mean, module->norm->running_mean)) << "rank " << rank;
    EXPECT_TRUE(same_bits(other->counter, module->counter));
    EXPECT_TRUE(
        same_bits(full_state_dict(*other_optimizer)["weight"], torch::full({33}, 1.0f + std::ldexp(1.0f, -20))));
  });
  ASSERT_TRUE(results.ok()) << results;
  const auto header = checkpoint::read_header(checkpoint::open_regular(folder / "c/model.safetensors"));
  EXPECT_EQ(header.find("norm.running_mean")->dtype, checkpoint::Dtype::kF32);
  EXPECT_EQ(header.find("norm.num_batches_tracked")->dtype, checkpoint::Dtype::kI64);
  EXPECT_EQ(header.find("counter")->dtype, checkpoint::Dtype::kI64);
  EXPECT_EQ(header.find("weight")->dtype, checkpoint::Dtype::kF32);
}

struct PairImpl : torch::nn::Module {  // two equal-shaped parameters, registered in either order
  torch::Tensor a, b;
  explicit PairImpl(bool reversed) {
    if (reversed) b = register_parameter("b", torch::zeros({40}));
    a = register_parameter("a", torch::zeros({40}));
    if (!reversed) b = register_parameter("b", torch::zeros({40}));
  }
};

// Field case 22.
TEST(FieldCase22, StateAndOptionsFollowNames) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    const auto make = [&](bool reversed, double lr, double decay) {
      auto module = std::make_shared<PairImpl>(reversed);
      using torch::optim::SGDOptions;
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(
          std::vector{reversed ? module->b : module->a},
          std::make_unique<SGDOptions>(SGDOptions(lr).momentum(0.9).weight_decay(reversed ? 0.0 : decay)));
      groups.emplace_back(
          std::vector{reversed ? module->a : module->b},
          std::make_unique<SGDOptions>(SGDOptions(lr).momentum(0.9).weight_decay(reversed ? decay : 0.0)));
      auto optimizer = shard(*module, torch::optim::SGD(std::move(groups), SGDOptions(lr)), group);
      return std::pair(module, std::move(optimizer));
    };
    auto [module, optimizer] = make(false, 0.5, 0.25);
    backward_with({module->a, module->b}, {torch::full({40}, 1.0f), torch::full({40}, 100.0f)});
    optimizer->step();
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
    auto [other, other_optimizer] = make(true, 0.01, 0.75);
    CheckpointState other_state;
    other_state.add("trainer", *other_optimizer);
    load_checkpoint(folder / "c", other_state);
    const auto options = [&](int g) {
      return static_cast<torch::optim::SGDOptions&>(other_optimizer->param_groups()[g].options());
    };
    EXPECT_EQ(options(0).lr(), 0.5);
    EXPECT_EQ(options(0).weight_decay(), 0.0) << "b's";
    EXPECT_EQ(options(1).weight_decay(), 0.25) << "a's";
    for (auto* each : {&optimizer, &other_optimizer}) {
      (*each)->zero_grad();
      auto& m = each == &optimizer ? module : other;
      backward_with({m->a, m->b}, {torch::zeros({40}), torch::zeros({40})});
      (*each)->step();
    }
    const FullParametersGuard whole(*optimizer), other_whole(*other_optimizer);
    EXPECT_TRUE(same_bits(module->a, other->a)) << other->a;
    EXPECT_TRUE(same_bits(module->b, other->b)) << other->b;
    EXPECT_FALSE(same_bits(module->a, module->b));
  });
  EXPECT_TRUE(results.ok()) << results;
}

// Field case 23.
TEST(FieldCase23, FrozenParametersComeBackAndAreFreshWhenUnfrozen) {
  const TemporaryFolder folder;
  const auto results = run_threads(2, [&](int, const Group& group) {
    const auto make = [&](float frozen) {
      auto module = toy({{1, 2, 3}, std::vector<float>(20, frozen)});
      module->tensors[1].set_requires_grad(false);
      auto optimizer = shard(
          *module, torch::optim::AdamW(module->parameters(), torch::optim::AdamWOptions(0.5).weight_decay(0.1)), group);
      return std::pair(module, std::move(optimizer));
    };
    auto [module, optimizer] = make(7.0f);
    for (int i = 0; i < 3; ++i) {
      optimizer->zero_grad();
      backward_with({module->tensors[0]}, {torch::ones({3})});
      optimizer->step();
    }
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
    auto [other, other_optimizer] = make(0.0f);
    CheckpointState other_state;
    other_state.add("trainer", *other_optimizer);
    load_checkpoint(folder / "c", other_state);
    EXPECT_TRUE(other->tensors[1].eq(7.0f).all().item<bool>());
    EXPECT_TRUE(same_bits(other->tensors[0], module->tensors[0]));
    other->tensors[1].set_requires_grad(true);
    other_optimizer->zero_grad();
    for (auto& each : other_optimizer->param_groups())
      static_cast<torch::optim::AdamWOptions&>(each.options()).weight_decay(0.0);
    backward_with({other->tensors[1]}, {torch::ones({20})});
    other_optimizer->step();
    EXPECT_TRUE(torch::allclose(other->tensors[1], torch::full({20}, 6.5f))) << other->tensors[1];
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(TiedParameters, AreStoredOnceWithAllNamesAndFollowAnyOfThem) {
  struct TiedImpl : torch::nn::Module {
    torch::Tensor weight;
    TiedImpl(const std::string& first, const std::string& second, float value) {
      weight = register_parameter(first, torch::full({30}, value));
      register_parameter(second, weight);
    }
  };
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    const auto make = [&](const std::string& first, const std::string& second, float value) {
      auto module = std::make_shared<TiedImpl>(first, second, value);
      auto optimizer = shard(*module, torch::optim::SGD(std::vector{module->weight}, 0.1), group);
      return std::pair(module, std::move(optimizer));
    };
    auto [module, optimizer] = make("embed", "head", 3.0f);
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
    auto [other, other_optimizer] = make("head", "embed", 0.0f);
    CheckpointState other_state;
    other_state.add("trainer", *other_optimizer);
    load_checkpoint(folder / "c", other_state);
    EXPECT_TRUE(same_bits(other->weight, module->weight));
  });
  ASSERT_TRUE(results.ok()) << results;
  const auto manifest = checkpoint::read_manifest(checkpoint::Folder::open(folder / "c"));
  ASSERT_EQ(manifest.file("model.safetensors")->tensors.size(), 1u);
  EXPECT_EQ(manifest.file("model.safetensors")->tensors[0].other_names, std::vector<std::string>{"head"});
}

TEST(SeveralOptimizers, OfOneModuleShareItsBuffersAndEachHasItsParameters) {
  const TemporaryFolder folder;
  struct Both {
    SmallNet net = TrainingRun::seeded(3);
    std::unique_ptr<ShardedOptimizer> front, back;
    explicit Both(const Group& group) {
      front = shard(*net, torch::optim::SGD(net->first->parameters(), 0.1), group);
      back = shard(*net, torch::optim::AdamW(net->out->parameters(), 0.1), group);
    }
    std::string digests() {
      const FullParametersGuard a(*front), b(*back);
      return std::to_string(digest(net->parameters())) + " " + std::to_string(digest(net->buffers()));
    }
  };
  const auto results = run_threads(3, [&](int, const Group& group) {
    Both both(group);
    both.net->dropout->eval();
    both.net(batch_of(0, 0)).square().sum().backward();
    both.front->step();
    both.back->step();
    CheckpointState state;
    state.add("front", *both.front);
    state.add("back", *both.back);
    save_checkpoint(folder / "c", state);
    Both other(group);
    EXPECT_NE(other.digests(), both.digests());
    CheckpointState reversed;
    reversed.add("back", *other.back);
    reversed.add("front", *other.front);
    load_checkpoint(folder / "c", reversed);
    EXPECT_EQ(other.digests(), both.digests());
  });
  EXPECT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
