// SPDX-License-Identifier: BSD-3-Clause
// kill -9 of any rank at any point of a save, a full disk, a file that can not grow, a folder that can not be written:
// the checkpoint that was there loads bit-exact, or the new one does. Field case 24.
#include <gmock/gmock.h>

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include "plugin/checkpoint/files.h"
#include "tests/checkpoint/files.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kFirst = 300, kSecond = 77;

Toy toy_with(float value) { return toy({std::vector<float>(kFirst, value), std::vector<float>(kSecond, value)}); }

void save_value(const Group& group, const std::string& folder, float value) {
  auto module = toy_with(value);
  auto optimizer =
      shard(*module, torch::optim::SGD(module->parameters(), torch::optim::SGDOptions(0.0).momentum(0.9)), group);
  backward_with(module, {std::vector<float>(kFirst, value), std::vector<float>(kSecond, value)});
  optimizer->step();  // momentum equals the value
  CheckpointState state;
  state.add("trainer", *optimizer);
  save_checkpoint(folder, state, CheckpointOptions().staging_bytes(64));
}

// The one value of everything in the checkpoint, or a failure.
float loaded_value(const std::string& folder) {
  auto module = toy_with(0);
  const auto group = init_process_group(c10::make_intrusive<c10d::HashStore>(), 0, 1);
  auto optimizer =
      shard(*module, torch::optim::SGD(module->parameters(), torch::optim::SGDOptions(0.0).momentum(0.9)), group);
  CheckpointState state;
  state.add("trainer", *optimizer);
  load_checkpoint(folder, state);
  const float value = module->tensors[0][0].item<float>();
  for (auto& parameter : optimizer->param_groups()[0].params()) {
    EXPECT_TRUE(parameter.eq(value).all().item<bool>());
    auto& momentum = static_cast<torch::optim::SGDParamState&>(*optimizer->state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_TRUE(momentum.momentum_buffer().eq(value).all().item<bool>()) << "weights and momentum of different saves";
  }
  return value;
}

int points_left = 0;  // of this process, before it ends itself
void count_down(const char*) {
  if (--points_left == 0) ::kill(::getpid(), SIGKILL);
}

// Saves `value`, and kills `victim` at its point number `point` (1, 2, ...). True when it lived to the end of the save.
bool save_and_kill(const std::string& folder, float value, int world, int victim, int point, bool watch_survivors) {
  RankProcesses ranks(world, [&](Rank& rank) {
    const Group group = rank.group();
    if (rank.rank == victim) {
      points_left = point;
      checkpoint::set_write_observer(count_down);
    }
    save_value(group, folder, value);
  });
  const auto result = ranks.wait(victim);
  if (result.signal == 0) return true;
  EXPECT_EQ(result.signal, SIGKILL);
  for (int r = 0; watch_survivors && r < world; ++r) {
    if (r == victim) continue;
    const auto survivor = ranks.wait(r);
    EXPECT_EQ(survivor.signal, 0);
    // After the commit a survivor may have finished before it could notice.
    if (!survivor.error.empty()) {
      EXPECT_THAT(survivor.error, HasSubstr("rank " + std::to_string(victim)));
    }
  }
  return false;  // the other ranks are killed here
}

TEST(FieldCase24Killed, AtEveryWritePointOfEveryRankOneWholeCheckpointIsThere) {
  const TemporaryFolder folder;
  int points = 0, replaced = 0;
  for (const int world : {2, 3}) {
    for (int victim = 0; victim < world; ++victim) {
      float old_value = 1, new_value = 2;
      auto results = run_processes(world, [&](int, const Group& group) { save_value(group, folder / "c", 1); });
      ASSERT_TRUE(results.ok()) << results;
      for (int point = 1;; ++point) {
        const bool finished = save_and_kill(folder / "c", new_value, world, victim, point, point % 16 == 0);
        const float value = loaded_value(folder / "c");
        ASSERT_TRUE(value == old_value || value == new_value)
            << "rank " << victim << " of " << world << ", point " << point;
        if (finished) {
          EXPECT_EQ(value, new_value);
          break;
        }
        ++points;
        if (value == new_value) {
          ++replaced;
          std::swap(old_value, new_value);
        }
      }
    }
  }
  std::printf("[ %d points, at %d of them the new checkpoint was there already ]\n", points, replaced);
  EXPECT_GE(points, 200);
  EXPECT_GE(replaced, 4) << "rank 0 was killed after the commit, too";
  EXPECT_EQ(checkpoint::Folder::open(folder.path()).names(), std::vector<std::string>{"c"})
      << "the last save cleaned up";
}

TEST(FieldCase24Killed, AFirstSaveIsThereWholeOrNotAtAll) {
  const TemporaryFolder folder;
  for (int point = 1, finished = 0; finished == 0; point += 3) {
    fs::remove_all(folder / "c");
    finished = save_and_kill(folder / "c", 5, 2, 0, point, false);
    if (fs::exists(folder / "c")) {
      EXPECT_EQ(loaded_value(folder / "c"), 5) << point;
    }
  }
  EXPECT_EQ(loaded_value(folder / "c"), 5);
}

// From the first step of a save on, files can not grow: the group's shared memory is there by then.
void limit_files(const char*) {
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = 500;  // bytes
  ::setrlimit(RLIMIT_FSIZE, &limit);
}

// What one rank's write meets is an error on all, the old checkpoint stays, nothing is left beside it.
TEST(AFailedWrite, OfOneRankIsAnErrorOnAllAndChangesNothing) {
  const TemporaryFolder folder;
  for (const int victim : {0, 2}) {
    auto results = run_processes(3, [&](int, const Group& group) { save_value(group, folder / "c", 1); });
    ASSERT_TRUE(results.ok()) << results;
    results = run_processes(3, [&](int rank, const Group& group) {
      if (rank == victim) {
        ::signal(SIGXFSZ, SIG_IGN);
        checkpoint::set_write_observer(limit_files);
      }
      const auto error = error_of([&] { save_value(group, folder / "c", 2); });
      EXPECT_THAT(error,
                  AllOf(HasSubstr("save_checkpoint: rank " + std::to_string(victim)), HasSubstr("File too large")));
      rlimit limit{};
      ::getrlimit(RLIMIT_FSIZE, &limit);
      limit.rlim_cur = limit.rlim_max;
      ::setrlimit(RLIMIT_FSIZE, &limit);
    });
    EXPECT_TRUE(results.ok()) << results;
    EXPECT_EQ(loaded_value(folder / "c"), 1);
    EXPECT_EQ(checkpoint::Folder::open(folder.path()).names(), std::vector<std::string>{"c"});
  }
}

TEST(AFullDisk, IsAnErrorOnAllRanksAndTheOldCheckpointStays) {
  const TemporaryFolder folder;
  if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "mounting a small file system needs root";
  auto results = run_processes(3, [&](int, const Group& group) { save_value(group, folder / "c", 1); });
  ASSERT_TRUE(results.ok()) << results;
  write_bytes(folder / "other", std::string(30'000, 'x'));
  results = run_processes(3, [&](int, const Group& group) {
    const auto error = error_of([&] { save_value(group, folder / "c", 2); });
    EXPECT_THAT(error, AllOf(HasSubstr("save_checkpoint: rank 0"), HasSubstr("No space left on device")));
  });
  EXPECT_TRUE(results.ok()) << results;
  EXPECT_EQ(loaded_value(folder / "c"), 1);
  EXPECT_EQ(checkpoint::Folder::open(folder.path()).names(), (std::vector<std::string>{"c", "other"}));
  ::umount(folder.path().c_str());
}

TEST(AReadOnlyFolder, IsAnErrorThatNamesIt) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "closed");
  fs::permissions(folder / "closed", fs::perms(0555));
  fs::permissions(folder.path(), fs::perms(0755));
  const auto results = run_process_ranks(1, [&](Rank&) {
    if (::geteuid() == 0) {
      EXPECT_EQ(::seteuid(65534), 0);  // root may write anywhere
    }
    int64_t step = 3;
    CheckpointState state;
    state.add("step", step);
    EXPECT_THAT(error_of([&] { save_checkpoint(folder / "closed/c", state); }),
                AllOf(HasSubstr("cannot make the folder '" + folder.path() + "/closed/.c.saving-"),
                      HasSubstr("Permission denied")));
    EXPECT_THAT(error_of([&] { load_checkpoint(folder / "closed/c", state); }), HasSubstr("cannot open the folder"));
    EXPECT_EQ(::seteuid(::getuid()), 0);
  });
  EXPECT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
