// SPDX-License-Identifier: BSD-3-Clause
// Asynchronous saves, and what saving and loading cost in memory and reads. Field case 26.
#include <gmock/gmock.h>

#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <new>

#include "plugin/checkpoint/files.h"
#include "tests/checkpoint/files.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace {

// Bytes that this process holds through operator new and libtorch's allocator, and the most it held.
std::atomic<int64_t> held{0}, most_held{0};
void count(int64_t bytes) {
  const int64_t now = held.fetch_add(bytes) + bytes;
  int64_t most = most_held.load();
  while (now > most && !most_held.compare_exchange_weak(most, now)) {
  }
}
constexpr size_t kHead = 64;

class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    count(static_cast<int64_t>(bytes));
    auto* memory = static_cast<char*>(std::aligned_alloc(64, (bytes + kHead + 63) / 64 * 64));
    if (memory == nullptr) throw std::bad_alloc();
    std::memcpy(memory, &bytes, sizeof bytes);
    return {memory + kHead, memory + kHead, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* pointer) {
    if (pointer == nullptr) return;
    auto* memory = static_cast<char*>(pointer) - kHead;
    size_t bytes = 0;
    std::memcpy(&bytes, memory, sizeof bytes);
    count(-static_cast<int64_t>(bytes));
    std::free(memory);
  }
};

}  // namespace

#ifndef __SANITIZE_ADDRESS__  // which has operators of its own
void* operator new(size_t bytes) {
  auto* memory = static_cast<char*>(std::malloc(bytes + kHead));
  if (memory == nullptr) throw std::bad_alloc();
  std::memcpy(memory, &bytes, sizeof bytes);
  count(static_cast<int64_t>(bytes));
  return memory + kHead;
}
void operator delete(void* pointer) noexcept {
  if (pointer == nullptr) return;
  auto* memory = static_cast<char*>(pointer) - kHead;
  size_t bytes = 0;
  std::memcpy(&bytes, memory, sizeof bytes);
  count(-static_cast<int64_t>(bytes));
  std::free(memory);
}
void operator delete(void* pointer, size_t) noexcept { operator delete(pointer); }
#endif

namespace trueshard::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Trainer {
  Toy module;
  std::unique_ptr<ShardedOptimizer> optimizer;
  CheckpointState state;
  Trainer(const Group& group, float value, size_t count = 1000)
      : module(toy({std::vector<float>(count, value), std::vector<float>(33, value)})) {
    optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
    state.add("trainer", *optimizer);
  }
  void set(float value) {
    const FullParametersGuard whole(*optimizer);
    const torch::NoGradGuard no_grad;
    for (auto& tensor : module->tensors) tensor.fill_(value);
  }
  float value() {
    const FullParametersGuard whole(*optimizer);
    EXPECT_TRUE(module->tensors[0].eq(module->tensors[1][0]).all().item<bool>());
    return module->tensors[0][0].item<float>();
  }
};

const auto kAsynchronous = CheckpointOptions().asynchronous(true);

TEST(AsynchronousSave, HoldsWhatWasThereWhenItWasCalled) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer trainer(group, 1);
    const auto handle = save_checkpoint(folder / "c", trainer.state, kAsynchronous);
    trainer.set(2);  // before anything is known to be written
    handle.wait();
    EXPECT_TRUE(handle.done());
    trainer.set(3);
    load_checkpoint(folder / "c", trainer.state);
    EXPECT_EQ(trainer.value(), 1);
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(AsynchronousSave, TheNextSaveOrLoadWaitsItsTurn) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer trainer(group, 0);
    for (int i = 1; i <= 5; ++i) {
      trainer.set(static_cast<float>(i));
      save_checkpoint(folder / "c", trainer.state, kAsynchronous);  // nobody waits
    }
    trainer.set(9);
    load_checkpoint(folder / "c", trainer.state);
    EXPECT_EQ(trainer.value(), 5);
  });
  EXPECT_TRUE(results.ok()) << results;
  EXPECT_EQ(checkpoint::Folder::open(folder.path()).names(), std::vector<std::string>{"c"});
}

TEST(AsynchronousSave, AnErrorIsThrownByWaitEachTimeOrElseByTheNextCallOnce) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "mine");
  write_bytes(folder / "mine/thesis.tex", "years of work");
  const auto results = run_threads(3, [&](int rank, const Group& group) {
    Trainer trainer(group, 1);
    const auto expected = AllOf(HasSubstr("trueshard[rank " + std::to_string(rank) + "/3] save_checkpoint: rank 0"),
                                HasSubstr("is not a trueshard checkpoint"));
    const auto handle = save_checkpoint(folder / "mine", trainer.state, kAsynchronous);
    EXPECT_THAT(error_of([&] { handle.wait(); }), expected);
    EXPECT_THAT(error_of([&] { handle.wait(); }), expected);
    save_checkpoint(folder / "c", trainer.state);  // seen already: goes on
    save_checkpoint(folder / "mine", trainer.state, kAsynchronous);
    EXPECT_THAT(error_of([&] { save_checkpoint(folder / "c", trainer.state, kAsynchronous); }), expected);
    save_checkpoint(folder / "c", trainer.state, kAsynchronous).wait();
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(AsynchronousSave, TrainingGoesOnBesideIt) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    Trainer trainer(group, 1, 200'000);
    for (int i = 0; i < 5; ++i) {
      save_checkpoint(folder / "c", trainer.state, CheckpointOptions(kAsynchronous).staging_bytes(1000));
      for (int step = 0; step < 3; ++step) {
        trainer.optimizer->zero_grad();
        backward_with(trainer.module->tensors, {torch::ones({200'000}), torch::ones({33})});
        trainer.optimizer->step();
      }
    }
  });  // the last one is finished after its group's owner is gone
  EXPECT_TRUE(results.ok()) << results;
}

TEST(AsynchronousSave, AProgramThatEndsFinishesIt) {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    int64_t step = 7;
    CheckpointState state;
    state.add("step", step);
    save_checkpoint(folder / "c", state, kAsynchronous);
    std::exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  int64_t step = 0;
  CheckpointState state;
  state.add("step", step);
  load_checkpoint(folder / "c", state);
  EXPECT_EQ(step, 7);
}

// Field case 26.
TEST(FieldCase26, SavingAndLoadingNeedOneShardAndTheStagingAtMost) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer replaces the operators that count";
#endif
  constexpr int64_t kMiB = int64_t{1} << 20, kTensors = 64, kElements = kMiB / 4;
  const TemporaryFolder folder;
  for (const auto stage : {Stage::Zero1, Stage::Zero2, Stage::Zero3}) {
    const auto results = run_processes(4, [&](int rank, const Group& group) {
      static CountingAllocator allocator;
      c10::SetCPUAllocator(&allocator, 100);
      std::vector<torch::Tensor> values;
      for (int64_t i = 0; i < kTensors; ++i) values.push_back(torch::full({kElements}, static_cast<float>(i)));
      auto module = toy_of(values);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group, ShardOptions().stage(stage));
      CheckpointState state;
      state.add("trainer", *optimizer);
      const auto extra = [&](const std::function<void()>& call) {
        const int64_t before = held.load();
        most_held = before;
        call();
        return most_held.load() - before;
      };
      auto& counters = checkpoint::io_counters();
      const auto options = CheckpointOptions().staging_bytes(kMiB);
      EXPECT_LE(extra([&] { save_checkpoint(folder / "c", state, options); }), kMiB) << "rank " << rank;
      EXPECT_LE(
          extra([&] { save_checkpoint(folder / "c", state, CheckpointOptions(options).asynchronous(true)).wait(); }),
          17 * kMiB);
      const int64_t read_before = counters.bytes_read;
      EXPECT_LE(extra([&] { load_checkpoint(folder / "c", state, LoadOptions().staging_bytes(kMiB)); }), 17 * kMiB);
      EXPECT_LE(counters.bytes_read - read_before, 16 * kMiB + kMiB / 8);
      EXPECT_GE(counters.bytes_read - read_before, 15 * kMiB) << "the counter counts";
    });
    EXPECT_TRUE(results.ok()) << results;
  }
}

}  // namespace
}  // namespace trueshard::testing
