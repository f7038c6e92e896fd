// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/transport.h"

#include <dirent.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "plugin/comm/channel.h"
#include "plugin/comm/connect.h"
#include "tests/support/ranks.h"

namespace trueshard::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::Rank;
using testing::RankProcesses;
using testing::RankResults;

std::shared_ptr<Transport> join(const Rank& rank, milliseconds timeout = milliseconds(20000),
                                const std::string& group = "g") {
  return connect(rank.store, rank.rank, rank.world, group, timeout);
}

int open_files() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

std::set<std::string> shared_files() {
  std::set<std::string> names;
  DIR* folder = ::opendir("/dev/shm");
  while (const dirent* entry = ::readdir(folder)) {
    if (std::string(entry->d_name).rfind("trueshard", 0) == 0) names.insert(entry->d_name);
  }
  ::closedir(folder);
  return names;
}

// Names that were not there before, once those that other programs use for a moment are gone again.
std::set<std::string> left_behind(const std::set<std::string>& before) {
  std::set<std::string> added;
  for (int i = 0; i < 2000; ++i) {
    added.clear();
    for (const std::string& name : shared_files()) {
      if (before.count(name) == 0) added.insert(name);
    }
    if (added.empty()) break;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return added;
}

// Every rank writes its own number into its block and sees everybody else's.
void exchange_blocks(const std::shared_ptr<Transport>& transport, size_t bytes) {
  Channel channel(transport, "test", {});
  const auto region = transport->allocate("block", bytes);
  const int rank = transport->rank();
  ASSERT_EQ(region->bytes(rank), bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(region->data(rank)) % 64, 0u);
  for (size_t i = 0; i < bytes; i += 1000) ASSERT_EQ(region->data(rank)[i], std::byte{0});
  std::memset(region->data(rank), rank + 1, bytes);
  const uint64_t seq = channel.post(Fingerprint::of("fill"));
  channel.wait_all_posted(seq);
  for (int r = 0; r < transport->size(); ++r) {
    for (size_t i = 0; i < bytes; i += 999)
      ASSERT_EQ(region->data(r)[i], static_cast<std::byte>(r + 1)) << r << " " << i;
  }
  channel.done_reading(seq);
  channel.wait_all_read(seq);
}

TEST(Transport, ThreadsOfOneProcessShareMemory) {
  for (const int world : {1, 2, 3, 5}) {
    const RankResults results = testing::run_thread_ranks(world, [](Rank& rank) {
      const auto transport = join(rank);
      EXPECT_STREQ(transport->kind(), "threads");
      exchange_blocks(transport, 100000);
    });
    EXPECT_TRUE(results.ok()) << results;
  }
}

TEST(Transport, ProcessesShareMemoryAndLeaveNothingBehind) {
  const auto before = shared_files();
  const RankResults results = testing::run_process_ranks(3, [](Rank& rank) {
    const int files = open_files();
    {
      const auto transport = join(rank);
      EXPECT_STREQ(transport->kind(), "shared memory");
      exchange_blocks(transport, 3000000);
    }
    EXPECT_EQ(open_files(), files);
  });
  EXPECT_TRUE(results.ok()) << results;
  EXPECT_THAT(left_behind(before), ::testing::IsEmpty());
}

TEST(Transport, ProcessesWithoutACommonProcUseFilesThatAreUnlinkedAtOnce) {
  const auto before = shared_files();
  const RankResults results = testing::run_process_ranks(3, [&before](Rank& rank) {
    ConnectTestOptions options;
    options.other_pid_namespace = true;
    const auto transport = connect_as({rank.store, rank.rank, rank.world, "g", milliseconds(20000)}, options);
    exchange_blocks(transport, 3000000);
    EXPECT_THAT(left_behind(before), ::testing::IsEmpty());
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Transport, WithoutACommonProcADeadPeerIsStillNoticed) {
  RankProcesses processes(3, [](Rank& rank) {
    ConnectTestOptions options;
    options.other_pid_namespace = true;
    const auto transport = connect_as({rank.store, rank.rank, rank.world, "g", milliseconds(60000)}, options);
    Channel channel(transport, "c", {});
    const uint64_t first = channel.post(Fingerprint::of("first"));
    channel.wait_all_posted(first);
    if (rank.rank == 1) {
      rank.marks[0] = 1;
      ::pause();
    }
    channel.wait_all_posted(channel.post(Fingerprint::of("second")));
  });
  ASSERT_TRUE(processes.wait_mark(0, 1));
  processes.kill(1);
  const RankResults results = processes.wait();
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (const int r : {0, 2}) EXPECT_THAT(results[static_cast<size_t>(r)].error, HasSubstr("rank 1 is gone"));
}

TEST(Transport, RanksOnDifferentHostsAreTheSameErrorOnAllRanks) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    ConnectTestOptions options;
    options.hostname = rank.rank == 2 ? "other" : "here";
    connect_as({rank.store, rank.rank, rank.world, "g", milliseconds(20000)}, options);
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(results[static_cast<size_t>(r)].error, "trueshard[rank " + std::to_string(r) +
                                                         "/3] group 'g': rank 0 runs on host 'here' and rank 2 on host "
                                                         "'other', but all ranks of a group must run on one "
                                                         "host in this version; start them on one host");
  }
}

TEST(Transport, APeerThatNeverArrivesIsNamed) {
  const RankResults results = testing::run_thread_ranks(4, [](Rank& rank) {
    if (rank.rank == 1 || rank.rank == 3) return;
    join(rank, milliseconds(700));
  });
  for (const size_t r : {0u, 2u}) {
    EXPECT_THAT(results[r].error, HasSubstr("ranks 1 and 3 did not arrive within 700 ms"));
    EXPECT_THAT(results[r].error, HasSubstr("check that all 4 ranks were started"));
  }
}

TEST(Transport, AFailureIsSeenByAllRanksWithItsFirstText) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    const auto transport = join(rank);
    Channel channel(transport, "c", {});
    if (rank.rank == 1) {
      transport->fail("the disk is full");
      transport->fail("a later one");
    } else {
      const uint64_t seq = channel.post(Fingerprint::of("work"));
      try {
        channel.wait_all_posted(seq);
      } catch (const std::exception&) {
      }
    }
    EXPECT_TRUE(transport->failed());
    channel.post(Fingerprint::of("more"));
  });
  for (size_t r = 0; r < 3; ++r) {
    EXPECT_THAT(results[r].error, HasSubstr("the group has failed, reported by rank 1: the disk is full")) << r;
  }
}

TEST(Transport, AllocationsThatDoNotMatchAreAnErrorOnAllRanksAndTheGroupGoesOn) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    const auto transport = join(rank);
    EXPECT_THROW(transport->allocate(rank.rank == 2 ? "y" : "x", 64), c10::DistBackendError);
    exchange_blocks(transport, 64);
    transport->allocate(rank.rank == 2 ? "y" : "x", 64);
  });
  EXPECT_THAT(results[0].error, HasSubstr("this rank allocates 'x' but rank 2 allocates 'y'"));
  EXPECT_THAT(results[2].error, HasSubstr("this rank allocates 'y' but rank 0 allocates 'x'"));
}

TEST(Transport, RanksMayAskForDifferentSizesAndForNothing) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    const auto transport = join(rank);
    const auto region = transport->allocate("uneven", static_cast<size_t>(rank.rank) * 1000);
    EXPECT_EQ(region->bytes(0), 0u);
    EXPECT_EQ(region->bytes(2), 2000u);
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Transport, LargeBlocksCostNothingUntilTheyAreTouched) {
  const RankResults results = testing::run_process_ranks(2, [](Rank& rank) {
    const auto transport = join(rank);
    const auto region = transport->allocate("huge", size_t{1} << 36);
    region->data(rank.rank)[(size_t{1} << 36) - 1] = std::byte{1};
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Transport, TwoGroupsOfTheSameRanksAreIndependent) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    const auto first = join(rank, milliseconds(20000), "first");
    const auto second = join(rank, milliseconds(20000), "second");
    if (rank.rank == 0) first->fail("only this one");
    exchange_blocks(second, 1000);
    EXPECT_FALSE(second->failed());
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Transport, ARankThatClosesTheGroupIsReportedAndNotWaitedForUntilTheTimeout) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    const auto transport = join(rank, std::chrono::minutes(10));
    Channel channel(transport, "c", {});
    if (rank.rank == 2) return;
    channel.wait_all_posted(channel.post(Fingerprint::of("work")));
  });
  EXPECT_TRUE(results[2].ok());
  EXPECT_THAT(results[0].error, HasSubstr("rank 2"));
  EXPECT_THAT(results[0].error + results[1].error,
              HasSubstr("rank 2 is gone (has closed the group) and has not posted 'work'"));
}

TEST(Transport, AKilledRankIsAnErrorForTheOthersAndLeavesNothingBehind) {
  const auto before = shared_files();
  RankProcesses processes(3, [](Rank& rank) {
    const auto transport = join(rank, std::chrono::minutes(10));
    Channel channel(transport, "c", {});
    channel.wait_all_posted(channel.post(Fingerprint::of("first")));
    if (rank.rank == 1) {
      rank.marks[0] = 1;
      ::pause();
    }
    channel.wait_all_posted(channel.post(Fingerprint::of("second")));
  });
  ASSERT_TRUE(processes.wait_mark(0, 1));
  const pid_t victim = processes.pid(1);
  processes.kill(1);
  const RankResults results = processes.wait();
  for (const size_t r : {0u, 2u}) {
    EXPECT_THAT(results[r].error, HasSubstr("rank 1 is gone (process " + std::to_string(victim) + " has ended)"));
    EXPECT_THAT(results[r].error, HasSubstr("has not posted 'second' (message 2"));
  }
  EXPECT_THAT(left_behind(before), ::testing::IsEmpty());
}

}  // namespace
}  // namespace trueshard::comm
