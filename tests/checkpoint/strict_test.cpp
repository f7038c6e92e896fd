// SPDX-License-Identifier: BSD-3-Clause
// Loading is strict both ways and all or nothing, on all ranks; damage is noticed and named. Field cases 20 and 24.
#include <gmock/gmock.h>

#include "plugin/checkpoint/files.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/training.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Trainer {
  Toy module;
  std::unique_ptr<ShardedOptimizer> optimizer;
  int64_t step = 0;
  CheckpointState state;
  Trainer(const Group& group, const Toy& toy_module, bool with_step = true, double lr = 0.1) : module(toy_module) {
    optimizer = shard(*module, torch::optim::AdamW(module->parameters(), torch::optim::AdamWOptions(lr)), group);
    state.add("trainer", *optimizer);
    if (with_step) state.add("step", step);
  }
  Trainer(const Group& group, const std::vector<std::vector<float>>& values) : Trainer(group, toy(values)) {}
  void one_step() {
    optimizer->zero_grad();
    std::vector<torch::Tensor> gradients;
    for (const auto& tensor : module->tensors) gradients.push_back(torch::ones_like(tensor));
    backward_with(module->tensors, gradients);
    optimizer->step();
    ++step;
  }
  uint64_t weights() {
    const FullParametersGuard whole(*optimizer);
    return digest(module->tensors);
  }
};

std::vector<float> many(float value, size_t count = 100) { return std::vector<float>(count, value); }

// Saves a trainer of two parameters on three ranks.
void save_two(const std::string& folder) {
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer trainer(group, {many(1), many(2, 50)});
    trainer.one_step();
    save_checkpoint(folder, trainer.state);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Every rank gets the same error (but for its own number) and has the weights, the counter and the rate it had.
void expect_refused(int world, const std::string& folder, const std::function<Toy()>& make, const std::string& expected,
                    const LoadOptions& options = {}) {
  const auto results = run_threads(world, [&](int rank, const Group& group) {
    Trainer trainer(group, make(), true, 0.5);
    const auto before = trainer.weights();
    const auto error = error_of([&] { load_checkpoint(folder, trainer.state, options); });
    EXPECT_THAT(
        error, HasSubstr("trueshard[rank " + std::to_string(rank) + "/" + std::to_string(world) + "] load_checkpoint"));
    EXPECT_THAT(error, HasSubstr(expected));
    EXPECT_EQ(trainer.weights(), before);
    EXPECT_EQ(trainer.step, 0);
    EXPECT_EQ(trainer.optimizer->param_groups()[0].options().get_lr(), 0.5);
    EXPECT_TRUE(trainer.optimizer->state().empty());
    trainer.one_step();  // and goes on
    return error.substr(error.find(']'));
  });
  ASSERT_TRUE(results.ok()) << results;
  for (const auto& each : results) EXPECT_EQ(each.report, results[0].report);
}

TEST(FieldCase20, MissingExtraMisshapenAndMistypedNamesAreAllNamed) {
  const TemporaryFolder folder;
  save_two(folder / "c");
  expect_refused(
      3, folder / "c", [] { return toy({many(0)}); }, "not in the program: 'trainer/p1'");
  expect_refused(
      3, folder / "c",
      [] {
        return toy({many(0), many(0, 50), many(0)});
      },
      "missing in the checkpoint: 'trainer/p2'");
  expect_refused(
      2, folder / "c",
      [] {
        return toy({many(0), many(0, 51)});
      },
      "'trainer/p1' (F32 [50] in the checkpoint, F32 [51] in the program)");
  expect_refused(
      2, folder / "c",
      [] {
        return toy_of({torch::zeros({100}), torch::zeros({50}, torch::kDouble)});
      },
      "'trainer/p1' (F32 [50] in the checkpoint, F64 [50] in the program)");
}

TEST(StrictLoad, EntriesMustFitToo) {
  const TemporaryFolder folder;
  save_two(folder / "c");
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer without(group, toy({many(1), many(2, 50)}), false);
    EXPECT_THAT(error_of([&] { load_checkpoint(folder / "c", without.state); }),
                HasSubstr("not in the program: 'step'"));
    double other = 1.5;
    without.state.add("other", other);
    EXPECT_THAT(error_of([&] { load_checkpoint(folder / "c", without.state); }),
                HasSubstr("missing in the checkpoint: 'other'"));
    load_checkpoint(folder / "c", without.state, LoadOptions().allow_missing({"other"}).allow_unexpected({"step"}));
    EXPECT_EQ(other, 1.5);
    Trainer mistyped(group, toy({many(1), many(2, 50)}), false);
    std::string step;
    mistyped.state.add("step", step);
    EXPECT_THAT(error_of([&] { load_checkpoint(folder / "c", mistyped.state); }),
                HasSubstr("'step' (integer in the checkpoint, text in the program)"));
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(StrictLoad, AnotherOptimizerIsRefused) {
  const TemporaryFolder folder;
  save_two(folder / "c");
  const auto results = run_threads(3, [&](int, const Group& group) {
    auto module = toy({many(1), many(2, 50)});
    auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group);
    CheckpointState state;
    int64_t step = 0;
    state.add("trainer", *optimizer);
    state.add("step", step);
    EXPECT_THAT(error_of([&] { load_checkpoint(folder / "c", state); }),
                HasSubstr("'trainer' (optimizer AdamW in the checkpoint, SGD in the program)"));
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(StrictLoad, ListedNamesLoadPartially) {
  const TemporaryFolder folder;
  save_two(folder / "c");
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer other(group, {many(0), many(0, 51), many(9)});
    EXPECT_THAT(
        error_of([&] { load_checkpoint(folder / "c", other.state, LoadOptions().allow_missing({"trainer/p2"})); }),
        AllOf(HasSubstr("'trainer/p1' (F32 [50]"), HasSubstr("'trainer/param_groups.p2'")));
    Trainer more(group, {many(0), many(0, 50), many(9)});
    load_checkpoint(folder / "c", more.state, LoadOptions().allow_missing({"trainer/p2", "trainer/param_groups.*"}));
    EXPECT_TRUE(more.module->tensors[2].eq(9).all().item<bool>());
    EXPECT_FALSE(more.module->tensors[0].eq(0).any().item<bool>());
    Trainer fewer(group, {many(0)});
    load_checkpoint(folder / "c", fewer.state, LoadOptions().allow_unexpected({"trainer/p1", "trainer/state.p1.*"}));
    EXPECT_TRUE(same_bits(fewer.module->tensors[0], more.module->tensors[0]));
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(FieldCase24, EachDamagedPartIsNamedOnAllRanks) {
  const TemporaryFolder folder;
  save_two(folder / "good");
  save_two(folder / "twin");
  const auto fresh = [] { return toy({many(0), many(0, 50)}); };
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "ranks.safetensors", "manifest.json"}) {
    const auto damage = [&](const std::function<void(const std::string&)>& change) {
      fs::remove_all(folder / "c");
      fs::copy(folder / "good", folder / "c");
      change(folder / ("c/" + std::string(name)));
      expect_refused(3, folder / "c", fresh, name);
    };
    const auto bytes = read_bytes(folder / ("good/" + std::string(name)));
    damage([&](const std::string& path) { write_bytes(path, bytes.substr(0, bytes.size() - 1)); });
    damage([&](const std::string& path) { fs::remove(path); });
    damage([&](const std::string& path) { write_bytes(path, bytes + "x"); });
    for (const size_t at : {size_t{0}, size_t{9}, bytes.size() / 2, bytes.size() - 5}) {
      damage([&](const std::string& path) {
        auto flipped = bytes;
        flipped[at] = static_cast<char>(flipped[at] ^ 4);
        write_bytes(path, flipped);
      });
    }
  }
  // Swapped between two saves of the same program whose weights differ.
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer trainer(group, {many(3), many(4, 50)});
    trainer.one_step();
    save_checkpoint(folder / "twin", trainer.state);
  });
  ASSERT_TRUE(results.ok()) << results;
  fs::remove_all(folder / "c");
  fs::copy(folder / "good", folder / "c");
  fs::copy_file(folder / "twin/model.safetensors", folder / "c/model.safetensors",
                fs::copy_options::overwrite_existing);
  expect_refused(3, folder / "c", fresh, "in 'model.safetensors' have another checksum than the manifest says");
}

TEST(FieldCase24, ASaveOnFewerRanksLeavesNothingOfTheOneItReplaces) {
  const TemporaryFolder folder;
  std::string two_alone;
  for (const int world : {2, 4, 2}) {
    const auto results = run_threads(world, [&](int, const Group& group) {
      Trainer trainer(group, {many(static_cast<float>(world)), many(2, 50)});
      save_checkpoint(folder / "c", trainer.state);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
  EXPECT_EQ(
      checkpoint::Folder::open(folder / "c").names(),
      (std::vector<std::string>{"manifest.json", "model.safetensors", "optimizer.safetensors", "ranks.safetensors"}));
  EXPECT_EQ(checkpoint::Folder::open(folder.path()).names(), std::vector<std::string>{"c"});
  const auto results = run_threads(4, [&](int, const Group& group) {
    Trainer trainer(group, {many(0), many(0, 50)});
    load_checkpoint(folder / "c", trainer.state);
    EXPECT_TRUE(trainer.module->tensors[0].eq(2).all().item<bool>());
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(SaveCheckpoint, RefusesOnAllRanksWhatItCanNotStore) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Trainer trainer(group, {many(1), many(2, 50)});
    trainer.step = rank == 2 ? 8 : 7;
    EXPECT_THAT(error_of([&] { save_checkpoint(folder / "c", trainer.state); }),
                AllOf(HasSubstr("save_checkpoint: ranks differ: rank 0 has ['step'"), HasSubstr("rank 2 has ['step'")));
    trainer.step = 7;
    EXPECT_THAT(error_of([&] { save_checkpoint(folder / (rank == 1 ? "c" : "d"), trainer.state); }),
                HasSubstr("ranks differ: rank 0 has [destination"));
    {
      const FullParametersGuard whole(*trainer.optimizer);
      EXPECT_THAT(error_of([&] { save_checkpoint(folder / "c", trainer.state); }),
                  HasSubstr("FullParametersGuard is alive"));
    }
    EXPECT_THAT(error_of([&] { trainer.state.add("step", trainer.step); }), HasSubstr("'step' was added already"));
    for (const char* name : {"", "../x", ".hidden", "a b", "a/b"})
      EXPECT_THAT(error_of([&] { trainer.state.add(name, trainer.step); }), HasSubstr("expected letters, digits"))
          << name;
    save_checkpoint(folder / "c", trainer.state);
  });
  EXPECT_TRUE(results.ok()) << results;
  EXPECT_EQ(checkpoint::Folder::open(folder.path()).names(), std::vector<std::string>{"c"});
}

TEST(UserValues, OfEveryKindComeBack) {
  const TemporaryFolder folder;
  int64_t integer = INT64_MIN;
  double number = -0.1;
  bool flag = true;
  std::string text = "epoch \"1\"\n";
  auto tensor = random_values(1, {3, 4}, torch::kDouble);
  torch::Tensor undefined;
  CheckpointState state;
  state.add("integer", integer);
  state.add("number", number);
  state.add("flag", flag);
  state.add("text", text);
  state.add("tensor", tensor);
  save_checkpoint(folder / "c", state);  // one process without a group
  const auto saved = tensor.clone();
  integer = 0, number = 0, flag = false, text = "";
  tensor.zero_();
  load_checkpoint(folder / "c", state);
  EXPECT_EQ(integer, INT64_MIN);
  EXPECT_EQ(number, -0.1);
  EXPECT_TRUE(flag);
  EXPECT_EQ(text, "epoch \"1\"\n");
  EXPECT_TRUE(same_bits(tensor, saved));
  CheckpointState other;
  other.add("tensor", undefined);
  load_checkpoint(folder / "c", other, LoadOptions().allow_unexpected({"*"}));
  EXPECT_TRUE(same_bits(undefined, saved));
}

}  // namespace
}  // namespace trueshard::testing
