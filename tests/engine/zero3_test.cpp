// SPDX-License-Identifier: BSD-3-Clause
// ZeRO-3 on modules that know nothing of it: whatever touches a parameter finds it whole, and nothing else does.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/autocast_mode.h>

#include <sstream>
#include <thread>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

namespace nn = torch::nn;

// One of each kind of layer that libtorch's modules make special calls for.
struct ZooImpl : nn::Module {
  nn::Embedding embed{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  nn::LSTM lstm{nullptr};
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d bn{nullptr};
  nn::MultiheadAttention attention{nullptr};
  torch::Tensor gain;  // read outside any submodule
  ZooImpl() {
    embed = register_module("embed", nn::Embedding(19, 8));
    encoder =
        register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                                       nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0), 2)));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(8, 8).num_layers(2)));
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 3, 3).padding(1)));
    bn = register_module("bn", nn::BatchNorm2d(3));
    attention = register_module("attention", nn::MultiheadAttention(8, 2));
    gain = register_parameter("gain", torch::ones({8}));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = encoder->forward(embed->forward(tokens).transpose(0, 1));
    x = std::get<0>(lstm->forward(x)) * gain;
    x = x + std::get<0>(attention->forward(x, x, x));
    x = bn->forward(conv->forward(x.transpose(0, 1).unsqueeze(1))).mean(1);
    const auto logits = torch::matmul(x, embed->weight.t());  // tied
    return nn::functional::cross_entropy(logits.flatten(0, 1), (tokens + 1).remainder(19).flatten());
  }
};
TORCH_MODULE(Zoo);

Zoo make_zoo() {
  Zoo zoo;
  const torch::NoGradGuard no_grad;
  int64_t seed = 0;
  for (auto& p : zoo->parameters())
    p.copy_(torch::randn(p.sizes(), at::detail::createCPUGenerator(static_cast<uint64_t>(++seed))) * 0.3);
  return zoo;
}
torch::Tensor tokens(int64_t seed) {
  return torch::randint(0, 19, {3, 5}, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)), torch::kLong);
}

// The smallest units and no budget: everything is freed again after every operator.
ShardOptions hardest() { return ShardOptions().stage(Stage::Zero3).unit_bytes(1).resident_bytes(0); }

template <typename Module>
std::unique_ptr<ShardedOptimizer> shard_sgd(Module& module, const Group& group, const ShardOptions& options,
                                            double lr = 0.1) {
  return shard(*module, torch::optim::SGD(module->parameters(), lr), group, options);
}

std::vector<torch::Tensor> gradients(ShardedOptimizer& optimizer, size_t count) {
  std::vector<torch::Tensor> all;
  for (size_t i = 0; i < count; ++i) all.push_back(whole_gradient(optimizer, i));
  optimizer.zero_grad();
  return all;
}

std::string run3(const std::function<std::string(int, const Group&)>& body) {
  const auto results = run_threads(3, [&](int rank, const Group& group) { return body(rank, group); });
  EXPECT_TRUE(results.ok()) << results;
  return results[0].report;
}

// Every way of running forward and backward gives ZeRO-2's bits.
std::string ways_of_running(int rank, const Group& group, const ShardOptions& options) {
  auto zoo = make_zoo();
  auto optimizer = shard_sgd(zoo, group, options);
  const size_t count = zoo->parameters().size();
  std::vector<torch::Tensor> seen;
  const auto note = [&](const std::vector<torch::Tensor>& more) { seen.insert(seen.end(), more.begin(), more.end()); };
  for (int iteration = 0; iteration < 3; ++iteration) {  // the first learns the order of use
    const auto x = tokens(10 * iteration + rank);
    zoo->forward(x).backward();
    note(gradients(*optimizer, count));
    auto first = zoo->forward(x), second = zoo->forward(x + 0);  // two forwards before a backward
    (first + second).backward();
    note(gradients(*optimizer, count));
    auto kept = zoo->forward(x);
    kept.backward({}, /*retain_graph=*/true);
    kept.backward();
    note(gradients(*optimizer, count));
    {
      const torch::NoGradGuard no_grad;
      zoo->eval();
      note({zoo->forward(x)});
      const c10::InferenceMode inference;
      note({zoo->forward(x).clone()});
      zoo->train();
    }
    at::autocast::set_autocast_enabled(at::kCPU, true);
    auto cast = zoo->forward(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    cast.backward();
    note({cast.detach()});
    optimizer->step();
    optimizer->zero_grad();
  }
  if (options.resident_bytes() == 0) {
    EXPECT_EQ(optimizer->metrics().memory.parameters, 0);
  }
  return std::to_string(digest(seen)) + " " + std::to_string(digest(zoo->parameters()));
}

TEST(Zero3, ComputesTheSameBitsInEveryWayOfRunning) {
  const auto run = [](const ShardOptions& options) {
    return run3([&](int rank, const Group& group) { return ways_of_running(rank, group, options); });
  };
  const auto expected = run(ShardOptions().stage(Stage::Zero2));
  EXPECT_EQ(run(hardest()), expected);
  EXPECT_EQ(run(ShardOptions().stage(Stage::Zero3).units({"encoder", "lstm"}).unit_bytes(300)), expected);
}

TEST(Zero3, KeepsTheIdentityOfTensorsAndStorages) {
  run3([](int, const Group& group) {
    auto zoo = make_zoo();
    std::vector<std::pair<void*, void*>> before;
    const auto identities = [&] {
      std::vector<std::pair<void*, void*>> all;
      for (auto& p : zoo->parameters()) all.emplace_back(p.unsafeGetTensorImpl(), p.storage().unsafeGetStorageImpl());
      return all;
    };
    before = identities();
    auto optimizer = shard_sgd(zoo, group, hardest().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
    EXPECT_EQ(identities(), before);
    { const FullParametersGuard whole(*optimizer); }
    EXPECT_EQ(identities(), before);
    return std::string();
  });
}

std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

TEST(Zero3, ReadingAFreedParameterByRawPointerSaysWhatToDo) {
  run3([](int, const Group& group) {
    auto zoo = make_zoo();
    auto optimizer = shard_sgd(zoo, group, hardest());
    const std::string expected = "parameter 'gain' is sharded (Stage::Zero3) and not whole";
    const auto text = thrown([&] { (void)zoo->gain.const_data_ptr<float>(); });
    EXPECT_NE(text.find(expected), std::string::npos) << text;
    EXPECT_NE(text.find("FullParametersGuard"), std::string::npos) << text;
    EXPECT_NE(thrown([&] { (void)zoo->gain.detach().data_ptr(); }).find(expected), std::string::npos);
    EXPECT_NE(thrown([&] {
                std::ostringstream file;
                torch::save(zoo, file);
              }).find("is sharded (Stage::Zero3)"),
              std::string::npos);
    const FullParametersGuard whole(*optimizer);
    EXPECT_EQ(zoo->gain.const_data_ptr<float>()[0], zoo->gain[0].item<float>());
    std::ostringstream file;
    torch::save(zoo, file);
    EXPECT_GT(file.str().size(), 1000u);
    return std::string();
  });
}

TEST(Zero3, WritesToAParameterAreNoticedByWhateverWay) {
  const auto run = [](const ShardOptions& options) {
    return run3([&](int rank, const Group& group) {
      auto zoo = make_zoo();
      auto optimizer = shard_sgd(zoo, group, options);
      const auto step = [&](int64_t seed) {
        zoo->forward(tokens(seed + rank)).backward();
        optimizer->step();
        optimizer->zero_grad();
      };
      step(1);
      {
        const torch::NoGradGuard no_grad;
        zoo->gain.mul_(1.5);
        zoo->embed->weight[3].zero_();
        zoo->lstm->parameters()[0].detach().add_(0.25);
      }
      step(4);
      zoo->conv->weight.set_data(torch::full_like(zoo->conv->weight, 0.125));
      step(7);
      return std::to_string(digest(zoo->parameters()));
    });
  };
  EXPECT_EQ(run(hardest()), run(ShardOptions().stage(Stage::Zero2)));
}

TEST(Zero3, AWriteOnOneRankIsAnErrorOnAll) {
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    auto zoo = make_zoo();
    auto optimizer = shard_sgd(zoo, group, hardest());
    if (rank == 1) {
      const torch::NoGradGuard no_grad;
      zoo->gain.mul_(2);
    }
    zoo->forward(tokens(rank)).backward();
    optimizer->step();
  });
  for (const auto& result : results) EXPECT_NE(result.error.find("parameters"), std::string::npos) << result.error;
}

TEST(Zero3, ExceptionsInForwardAndBackwardLeaveNothingPinned) {
  run3([](int rank, const Group& group) {
    auto zoo = make_zoo();
    auto optimizer = shard_sgd(zoo, group, hardest());
    EXPECT_THROW(zoo->embed->forward(torch::full({2}, 100, torch::kLong)), c10::Error);
    auto handle = zoo->gain.register_hook([](torch::Tensor) -> torch::Tensor { throw std::runtime_error("mine"); });
    EXPECT_THROW(zoo->forward(tokens(rank)).backward(), std::runtime_error);
    zoo->gain.remove_hook(handle);
    EXPECT_EQ(optimizer->metrics().memory.parameters, 0);
    optimizer->zero_grad();
    zoo->forward(tokens(rank)).backward();
    optimizer->step();
    EXPECT_EQ(optimizer->metrics().memory.parameters, 0);
    return std::string();
  });
}

// Ranks that take different ways through the model need no help from each other.
struct ExpertsImpl : nn::Module {
  nn::ModuleList experts{nullptr};
  ExpertsImpl() {
    experts = register_module("experts", nn::ModuleList());
    for (int i = 0; i < 4; ++i) experts->push_back(nn::Linear(6, 6));
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (auto& p : parameters())
      p.copy_(torch::randn(p.sizes(), at::detail::createCPUGenerator(static_cast<uint64_t>(++seed))));
  }
  torch::Tensor forward(torch::Tensor x, int64_t first) {
    for (int64_t i = 0; i < 2; ++i) x = torch::tanh(experts[(first + i) % 4]->as<nn::Linear>()->forward(x));
    return x.square().mean();
  }
};
TORCH_MODULE(Experts);

TEST(Zero3, RanksMayTakeDifferentWaysThroughAModel) {
  const auto run = [](const ShardOptions& options) {
    return run3([&](int rank, const Group& group) {
      Experts experts;
      auto optimizer = shard_sgd(experts, group, options);
      for (int step = 0; step < 4; ++step) {
        experts->forward(torch::ones({2, 6}) * (rank + 1), rank + step).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      return std::to_string(digest(experts->parameters()));
    });
  };
  EXPECT_EQ(run(hardest()), run(ShardOptions().stage(Stage::Zero2)));
}

TEST(Zero3, ForwardsMayRunInTwoThreadsAtOnce) {
  const auto ahead = ShardOptions().stage(Stage::Zero3).unit_bytes(300).resident_bytes(4000).prefetch_units(2);
  for (const auto& options : {hardest(), ahead}) {
    run3([&](int, const Group& group) {
      auto zoo = make_zoo();
      zoo->eval();
      const torch::NoGradGuard no_grad;
      const auto expected = zoo->forward(tokens(1)).item<float>();
      auto optimizer = shard_sgd(zoo, group, options);
      for (int round = 0; round < 2; ++round) {
        std::vector<std::thread> threads;
        for (int t = 0; t < 2; ++t) {
          threads.emplace_back([&] {
            const torch::NoGradGuard no_grad_here;
            for (int i = 0; i < 5; ++i) EXPECT_EQ(zoo->forward(tokens(1)).item<float>(), expected);
          });
        }
        for (auto& thread : threads) thread.join();
        { const FullParametersGuard next_round(*optimizer); }  // from then on the order of use is known
      }
      return std::string();
    });
  }
}

TEST(Zero3, TheModuleCanBeReadTrainedAndShardedAgainWhenItsOptimizerIsGone) {
  run3([](int rank, const Group& group) {
    auto zoo = make_zoo();
    uint64_t trained = 0;
    {
      auto optimizer = shard_sgd(zoo, group, hardest());
      zoo->forward(tokens(rank)).backward();
      optimizer->step();
      trained = digest(zoo->parameters());
    }
    EXPECT_EQ(digest(zoo->parameters()), trained);
    {
      auto optimizer = shard_sgd(zoo, group, hardest());
      EXPECT_EQ(digest(zoo->parameters()), trained);
    }
    {
      auto optimizer = shard_sgd(zoo, group, ShardOptions().stage(Stage::Zero1));
      EXPECT_EQ(digest(zoo->parameters()), trained);
    }
    {
      auto optimizer = shard_sgd(zoo, group, hardest());
      zoo->forward(tokens(rank)).backward();
      optimizer->step();
    }
    torch::optim::SGD plain(zoo->parameters(), 0.1);
    plain.zero_grad();
    const float before = zoo->gain[0].item<float>();
    zoo->forward(tokens(5)).backward();
    plain.step();
    EXPECT_NE(zoo->gain[0].item<float>(), before);
    return std::string();
  });
}

TEST(Zero3, WhatIsWholeStaysWithinTheBudget) {
  run3([](int rank, const Group& group) {
    std::vector<torch::Tensor> values;
    for (int i = 0; i < 8; ++i) values.push_back(torch::full({256}, 0.5 + i));  // 1 KB each
    Toy module(values);
    auto optimizer =
        shard_sgd(module, group,
                  ShardOptions().stage(Stage::Zero3).unit_bytes(1024).resident_bytes(2048).share_parameters(false));
    for (int step = 0; step < 3; ++step) {
      auto x = torch::full({256}, 1.0 + rank);
      for (auto& p : module->tensors) {
        x = torch::tanh(x * p);
        EXPECT_LE(optimizer->metrics().memory.parameters, 2048);
      }
      x.sum().backward();
      EXPECT_LE(optimizer->metrics().memory.parameters, 2048);
      optimizer->step();
      optimizer->zero_grad();
    }
    // From the second step on the order is known. Forward gathers 8 units; backward, which goes the other way, finds
    // the last two: 8 + 6.
    const auto before = optimizer->metrics().bytes_gathered;
    auto x = torch::full({256}, 1.0 + rank);
    for (auto& p : module->tensors) x = torch::tanh(x * p);
    x.sum().backward();
    const auto units = static_cast<double>(optimizer->metrics().bytes_gathered - before) / (1024.0 * 2 / 3);
    EXPECT_LT(units, 15.0);
    EXPECT_GT(units, 11.0);
    return std::string();
  });
}

TEST(Stages, ABackwardThroughAGraphFromBeforeTheStepIsAnError) {
  for (const auto stage : all_stages()) {
    run3([&](int rank, const Group& group) {
      auto zoo = make_zoo();
      auto optimizer = shard_sgd(zoo, group, ShardOptions().stage(stage));
      auto loss = zoo->forward(tokens(rank));
      loss.backward({}, /*retain_graph=*/true);
      optimizer->step();
      optimizer->zero_grad();
      const auto text = thrown([&] { loss.backward(); });
      EXPECT_NE(text.find("modified by an inplace operation"), std::string::npos) << text;
      return std::string();
    });
  }
}

TEST(Zero3, FrozenParametersAreShardedTooAndThaw) {
  const auto run = [](const ShardOptions& options) {
    return run3([&](int rank, const Group& group) {
      auto zoo = make_zoo();
      zoo->embed->weight.set_requires_grad(false);
      auto optimizer = shard_sgd(zoo, group, options);
      for (int step = 0; step < 4; ++step) {
        if (step == 2) zoo->embed->weight.set_requires_grad(true);
        zoo->forward(tokens(10 * step + rank)).backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      return std::to_string(digest(zoo->parameters()));
    });
  };
  EXPECT_EQ(run(hardest()), run(ShardOptions().stage(Stage::Zero2)));
}

TEST(Zero3, UnknownUnitsAreAnErrorOnAllRanks) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    auto zoo = make_zoo();
    shard_sgd(zoo, group, hardest().units({"encodr"}));
  });
  for (const auto& result : results)
    EXPECT_NE(result.error.find("ShardOptions.units names 'encodr'"), std::string::npos) << result.error;
}

}  // namespace
}  // namespace trueshard::testing
