// SPDX-License-Identifier: BSD-3-Clause
// Weights from elsewhere: what C++ programs have on disk, and plain safetensors files.
#include <gmock/gmock.h>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/script.h>

#include "plugin/checkpoint/safetensors.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/training.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

SmallNet net_of(int64_t seed) { return seeded_net(seed); }

std::string everything(SmallNet& net) {
  return std::to_string(digest(net->parameters())) + " " + std::to_string(digest(net->buffers()));
}

// Loads the file into nets sharded over three ranks and into a plain one; all must be `expected`.
void expect_loads(const std::string& path, SmallNet& expected) {
  for (const auto stage : {Stage::Replicated, Stage::Zero2, Stage::Zero3}) {
    std::vector<SmallNet> nets;
    for (int i = 0; i < 3; ++i) nets.push_back(net_of(9));
    const auto results = run_threads(3, [&](int rank, const Group& group) {
      auto& net = nets[static_cast<size_t>(rank)];
      auto optimizer = shard(*net, torch::optim::AdamW(net->parameters(), 0.1), group, ShardOptions().stage(stage));
      load_weights(path, *optimizer);
      const FullParametersGuard whole(*optimizer);
      EXPECT_EQ(everything(net), everything(expected)) << path;
    });
    ASSERT_TRUE(results.ok()) << results;
  }
  auto plain = net_of(9);
  load_weights(path, *plain);
  EXPECT_EQ(everything(plain), everything(expected)) << path;
}

c10::Dict<std::string, at::Tensor> state_dict_of(SmallNet& net) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& item : net->named_parameters()) dict.insert(item.key(), item.value().detach());
  for (const auto& item : net->named_buffers()) dict.insert(item.key(), item.value());
  return dict;
}

TEST(LoadWeights, ReadsAModuleSavedWithTorchSave) {
  const TemporaryFolder folder;
  auto net = net_of(1);
  torch::save(net, folder / "net.pt");
  expect_loads(folder / "net.pt", net);
}

TEST(LoadWeights, ReadsAStateDictionarySavedWithTorchSave) {
  const TemporaryFolder folder;
  auto net = net_of(2);
  const auto bytes = torch::pickle_save(state_dict_of(net));
  write_bytes(folder / "state.pt", {bytes.begin(), bytes.end()});
  expect_loads(folder / "state.pt", net);
}

TEST(LoadWeights, ReadsATorchScriptFile) {
  const TemporaryFolder folder;
  torch::jit::Module script("m");
  script.register_parameter("p0", torch::arange(40, torch::kFloat), false);
  script.register_parameter("p1", torch::full({3}, 2.5f), false);
  script.define("def forward(self, x):\n  return x * self.p0\n");
  script.save(folder / "script.pt");
  auto module = toy({std::vector<float>(40, 0), {0, 0, 0}});
  load_weights(folder / "script.pt", *module);
  EXPECT_TRUE(same_bits(module->tensors[0], torch::arange(40, torch::kFloat)));
  EXPECT_TRUE(same_bits(module->tensors[1], torch::full({3}, 2.5f)));
}

// Writes a tensor of values 0, 1, 2, ... rounded to the dtype, as plain safetensors.
void write_plain(const std::string& path, checkpoint::Dtype dtype, torch::Dtype torch_dtype,
                 const std::string& name = "p0") {
  const auto planned = checkpoint::plan_file({{name, dtype, {40}}}, {});
  const auto values = torch::arange(40, torch::kFloat).div(3).to(torch_dtype);
  write_bytes(path, planned.bytes + std::string(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
}

TEST(LoadWeights, WidensExactlyAndNeverRounds) {
  const TemporaryFolder folder;
  write_plain(folder / "bf16.safetensors", checkpoint::Dtype::kBF16, torch::kBFloat16);
  write_plain(folder / "fp64.safetensors", checkpoint::Dtype::kF64, torch::kDouble);
  const auto results = run_threads(3, [&](int, const Group& group) {
    auto module = toy({std::vector<float>(40, 0)});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group);
    load_weights(folder / "bf16.safetensors", *optimizer);
    const auto expected = torch::arange(40, torch::kFloat).div(3).to(torch::kBFloat16).to(torch::kFloat);
    EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], expected));
    EXPECT_THAT(error_of([&] { load_weights(folder / "fp64.safetensors", *optimizer); }),
                AllOf(HasSubstr("load_weights: rank 0"),
                      HasSubstr("'p0' is Double [40] in the file, Float [40] in the program")));
    EXPECT_TRUE(same_bits(full_state_dict(*optimizer)["p0"], expected)) << "nothing was loaded";
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(LoadWeights, IsStrictByName) {
  const TemporaryFolder folder;
  write_plain(folder / "a.safetensors", checkpoint::Dtype::kF32, torch::kFloat, "other");
  auto module = toy({std::vector<float>(40, 7)});
  EXPECT_THAT(error_of([&] { load_weights(folder / "a.safetensors", *module); }),
              AllOf(HasSubstr("'p0' is missing in the file"), HasSubstr("'other' is not in the program")));
  load_weights(folder / "a.safetensors", *module, LoadOptions().allow_missing({"p*"}).allow_unexpected({"other"}));
  EXPECT_TRUE(module->tensors[0].eq(7).all().item<bool>());
}

TEST(LoadWeights, TakesThoseOfACheckpointAndOfAFolderOfFiles) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    auto net = net_of(4);
    auto optimizer = shard(*net, torch::optim::AdamW(net->parameters(), 0.1), group);
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
  });
  ASSERT_TRUE(results.ok()) << results;
  auto net = net_of(4);
  expect_loads(folder / "c", net);
  expect_loads(folder / "c/model.safetensors", net);
}

TEST(LoadWeights, SaysHowToConvertWhatCanNotBeRead) {
  const TemporaryFolder folder;
  auto module = toy({{1}});
  write_bytes(folder / "x.pt", "not a zip");
  EXPECT_THAT(error_of([&] { load_weights(folder / "x.pt", *module); }),
              AllOf(HasSubstr("libtorch can not read"), HasSubstr("safetensors.torch.save_file(")));
  fs::create_directory(folder / "dcp");
  write_bytes(folder / "dcp/.metadata", "pickle");
  EXPECT_THAT(error_of([&] { load_weights(folder / "dcp", *module); }), HasSubstr("dcp_to_torch_save"));
  EXPECT_THAT(error_of([&] { load_weights(folder / "none", *module); }), HasSubstr("does not exist"));
}

// torch::save of an optimizer: loaded into the plain optimizer, shard() carries it over, and the run goes on with
// its bits (four equal leaves, whose mean is each of them).
TEST(ATorchSavedOptimizer, LoadsIntoThePlainOneBeforeSharding) {
  const TemporaryFolder folder;
  using torch::optim::AdamW;
  using torch::optim::AdamWOptions;
  auto plain = toy({std::vector<float>(50, 1), {2, 3}});
  AdamW adam(plain->parameters(), AdamWOptions(0.1));
  const auto step = [](Toy& module, torch::optim::Optimizer& optimizer) {
    for (auto& parameter : module->parameters()) parameter.mutable_grad() = torch::Tensor();
    backward_with(module->tensors, {torch::linspace(-1, 1, 50), torch::ones({2})});
    optimizer.step();
  };
  step(plain, adam);
  torch::save(plain, folder / "net.pt");
  torch::save(adam, folder / "adam.pt");
  step(plain, adam);
  const auto results = run_threads(4, [&](int, const Group& group) {
    auto module = toy({std::vector<float>(50, 0), {0, 0}});
    torch::load(module, folder / "net.pt");
    AdamW loaded(module->parameters(), AdamWOptions(0.1));
    torch::load(loaded, folder / "adam.pt");
    auto optimizer = shard(*module, std::move(loaded), group);
    optimizer->zero_grad();
    backward_with(module->tensors, {torch::linspace(-1, 1, 50), torch::ones({2})});
    optimizer->step();
    EXPECT_EQ(digest(module->parameters()), digest(plain->parameters()));
  });
  EXPECT_TRUE(results.ok()) << results;
}

// ---- Python --------------------------------------------------------------------------------------------------------

// Runs the Python half; 77: it lacks a package.
int run_python(const std::string& mode, const std::string& folder) {
  const std::string command = std::string(TRUESHARD_PYTHON_PEER) + " " + mode + " '" + folder + "'";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Toy python_toy(float value) {
  return toy_of({torch::full({10}, value), torch::full({7, 5}, value),
                 torch::full({3, 4, 2, 2}, value).to(torch::MemoryFormat::ChannelsLast)});
}

TEST(Python, ReadsACheckpointWithSafetensorsAndWithDcp) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    auto module = python_toy(0);
    {
      const torch::NoGradGuard no_grad;
      for (auto& tensor : module->tensors)
        tensor.copy_(torch::arange(tensor.numel(), torch::kFloat).view(tensor.sizes()));
    }
    auto optimizer =
        shard(*module, torch::optim::SGD(module->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9)), group);
    backward_with(module->tensors, {torch::ones({10}), torch::ones({7, 5}), torch::ones({3, 4, 2, 2})});
    optimizer->step();
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
  });
  ASSERT_TRUE(results.ok()) << results;
  const int status = run_python("check", folder / "c");
  if (status == 77) GTEST_SKIP() << "the Python of the build has no safetensors or no numpy";
  EXPECT_EQ(status, 0);
}

TEST(Python, WritesWeightsThatLoad) {
  const TemporaryFolder folder;
  const int status = run_python("make", folder.path());
  if (status == 77) GTEST_SKIP() << "the Python of the build has no safetensors or no numpy";
  ASSERT_EQ(status, 0);
  for (const char* name : {"plain.safetensors", "hf", "hf_shards", "state.pt", "script.pt"}) {
    const auto results = run_threads(3, [&](int, const Group& group) {
      auto module = python_toy(-1);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.5), group);
      load_weights(folder / name, *optimizer);
      for (auto& tensor : module->tensors)
        EXPECT_TRUE(tensor.equal(torch::arange(tensor.numel(), torch::kFloat).view(tensor.sizes()))) << name << tensor;
    });
    EXPECT_TRUE(results.ok()) << name << results;
  }
  auto module = python_toy(0);
  EXPECT_THAT(error_of([&] { load_weights(folder / "dcp", *module); }), HasSubstr("dcp_to_torch_save"));
  EXPECT_THAT(error_of([&] { load_weights(folder / "ordered.pt", *module); }),
              HasSubstr("safetensors.torch.save_file("));
}

}  // namespace
}  // namespace trueshard::testing
