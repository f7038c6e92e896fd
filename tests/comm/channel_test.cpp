// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/channel.h"

#include <gmock/gmock.h>

#include <c10/core/ScalarType.h>

#include "plugin/observe/trace.h"
#include "tests/support/ranks.h"

namespace trueshard::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using testing::Rank;
using testing::RankResults;

std::shared_ptr<Transport> join(const Rank& rank, milliseconds timeout = milliseconds(20000)) {
  return connect(rank.store, rank.rank, rank.world, "g", timeout);
}
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return testing::detail::text_of(error);
  }
  return "no error";
}

TEST(Channel, RecordsOfAllRanksArriveInOrderThroughFewSlots) {
  for (const int world : {1, 2, 3, 5}) {
    const auto work = [world](Rank& rank) {
      Channel channel(join(rank), "numbers", {sizeof(int64_t), 3});
      for (int64_t i = 1; i <= 2000; ++i) {
        const int64_t value = 1000000 * rank.rank + i;
        const uint64_t seq = channel.post(Fingerprint::of("count"), &value, sizeof value);
        ASSERT_EQ(seq, static_cast<uint64_t>(i));
        channel.wait_all_posted(seq);
        for (int r = 0; r < world; ++r) {
          int64_t got = 0;
          std::memcpy(&got, channel.record(r, seq), sizeof got);
          ASSERT_EQ(got, 1000000 * r + i);
        }
        channel.done_reading(seq);
      }
      EXPECT_EQ(channel.messages(), 2000u);
      EXPECT_GE(channel.seconds_waited(), 0);
    };
    const RankResults results = testing::run_thread_ranks(world, work);
    EXPECT_TRUE(results.ok()) << results;
  }
  const RankResults results = testing::run_process_ranks(3, [](Rank& rank) {
    Channel channel(join(rank), "numbers", {0, 2});
    for (int i = 0; i < 2000; ++i) {
      const uint64_t seq = channel.post(Fingerprint::of("count"));
      channel.wait_all_posted(seq);
      channel.done_reading(seq);
    }
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, AFastRankDoesNotOverwriteWhatASlowOneStillReads) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    Channel channel(join(rank), "c", {sizeof(int), 2});
    for (int i = 1; i <= 100; ++i) {
      if (i > 2) {
        channel.wait_all_read(channel.next() - 2);
        EXPECT_TRUE(channel.can_post());
      }
      const uint64_t seq = channel.post(Fingerprint::of("step"), &i, sizeof i);
      channel.wait_all_posted(seq);
      if (rank.rank == i % 3) std::this_thread::sleep_for(std::chrono::microseconds(300));
      for (int r = 0; r < 3; ++r) {
        int got = 0;
        std::memcpy(&got, channel.record(r, seq), sizeof got);
        EXPECT_EQ(got, i);
      }
      channel.done_reading(seq);
    }
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, MessagesMayBeLookedForWithoutWaiting) {
  const RankResults results = testing::run_thread_ranks(2, [](Rank& rank) {
    Channel channel(join(rank), "c", {0, 1});
    if (rank.rank == 0) {
      EXPECT_FALSE(channel.posted(1, 1));
      EXPECT_FALSE(channel.all_posted(1));
      rank.marks[0] = 1;
    } else {
      while (rank.marks[0] == 0) std::this_thread::yield();
    }
    EXPECT_TRUE(channel.can_post());
    const uint64_t seq = channel.post(Fingerprint::of("m"));
    EXPECT_EQ(channel.next(), 2u);
    channel.wait_posted(1 - rank.rank, seq);
    EXPECT_TRUE(channel.all_posted(seq));
    EXPECT_TRUE(rank.rank == 0 || !channel.all_read(seq) || rank.marks[1] != 0);
    if (rank.rank == 0) rank.marks[1] = 1;
    channel.done_reading(seq);
    channel.wait_all_read(seq);
    EXPECT_TRUE(channel.all_read(seq));
    EXPECT_TRUE(channel.can_post());
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, AMismatchNamesBothSidesAndOnlyTheFieldsThatDifferAndTheChannelGoesOn) {
  const RankResults results = testing::run_thread_ranks(4, [](Rank& rank) {
    Channel channel(join(rank), "optimizer 0", {});
    Fingerprint f = Fingerprint::of("reduce bucket");
    f.dtype = static_cast<uint32_t>(c10::ScalarType::BFloat16) + 1;
    f.bucket = rank.rank == 3 ? 8 : 7;
    f.elements = 100;
    f.detail = rank.rank == 3 ? 16 : 17;
    const std::string other = rank.rank == 3 ? "0" : "3";
    const std::string expected =
        "trueshard[rank " + std::to_string(rank.rank) +
        "/4] group 'g' channel 'optimizer 0', message 1: this rank runs 'reduce bucket' " + "but rank " + other +
        " runs 'reduce bucket'; bucket is " + (rank.rank == 3 ? "8 here and 7 on rank 0" : "7 here and 8 on rank 3") +
        "; detail is " + (rank.rank == 3 ? "0x10 here and 0x11 on rank 0" : "0x11 here and 0x10 on rank 3") +
        "; all ranks must make the same calls with the same arguments in the same order";
    EXPECT_EQ(error_of([&] { channel.wait_all_posted(channel.post(f)); }), expected);
    for (int i = 0; i < 10; ++i) {
      const uint64_t seq = channel.post(Fingerprint::of("next"));
      channel.wait_all_posted(seq);
      channel.done_reading(seq);
    }
    EXPECT_FALSE(channel.transport().failed());
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, ATimeoutNamesAllLateRanksAndWhatTheyHaveNotPosted) {
  const RankResults results = testing::run_thread_ranks(4, [](Rank& rank) {
    Channel channel(join(rank, milliseconds(300)), "c", {});
    if (rank.rank >= 2) {
      while (rank.marks[0] == 0) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_THAT(error_of([&] { channel.post(Fingerprint::of("late")); }),
                  HasSubstr("the group has failed, reported by rank"));
      return;
    }
    Fingerprint f = Fingerprint::of("finish reduction");
    f.dtype = static_cast<uint32_t>(c10::ScalarType::Float) + 1;
    f.elements = 12;
    if (rank.rank == 1) std::this_thread::sleep_for(milliseconds(50));  // rank 0 is the first to give up
    const std::string error = error_of([&] { channel.wait_all_posted(channel.post(f)); });
    EXPECT_THAT(
        error, HasSubstr("ranks 2 and 3 have not posted 'finish reduction' (message 1, float32, 12 elements) after 3"));
    EXPECT_THAT(error, HasSubstr("or give a longer timeout to the group"));
    EXPECT_TRUE(channel.transport().failed());
    rank.marks[0] = 1;
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, AWaitLimitOfItsOwnIsShorterThanTheGroupsTimeout) {
  const RankResults results = testing::run_thread_ranks(2, [](Rank& rank) {
    Channel channel(join(rank, std::chrono::minutes(10)), "c", {});
    if (rank.rank == 1) {
      while (!channel.transport().failed()) std::this_thread::sleep_for(milliseconds(5));
      return;
    }
    channel.set_wait_limit(milliseconds(200));
    channel.wait_all_posted(channel.post(Fingerprint::of("alone")));
  });
  EXPECT_THAT(results[0].error, HasSubstr("rank 1 has not posted 'alone' (message 1, 0 elements) after 2"));
  EXPECT_TRUE(results[1].ok());
}

TEST(Channel, ARankThatLeftAfterItsPartBreaksNobody) {
  const RankResults results = testing::run_process_ranks(3, [](Rank& rank) {
    Channel channel(join(rank), "c", {});
    const uint64_t seq = channel.post(Fingerprint::of("last"));
    if (rank.rank != 0) std::this_thread::sleep_for(milliseconds(200));
    if (rank.rank == 0) return;  // has posted all that the others need
    channel.wait_all_posted(seq);
    channel.done_reading(seq);
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, ChannelsThatDoNotMatchAreAnErrorOnAllRanks) {
  const RankResults results = testing::run_thread_ranks(3, [](Rank& rank) {
    const auto transport = join(rank);
    EXPECT_THAT(error_of([&] { Channel(transport, "c", {rank.rank == 1 ? size_t{500} : size_t{8}}); }),
                HasSubstr("record size and depth must agree"));
    EXPECT_THAT(error_of([&] { Channel(transport, rank.rank == 1 ? "x" : "y", {}); }),
                HasSubstr("allocates 'channel "));
    Channel good(transport, "c", {8});
    char big[16] = {};
    EXPECT_THAT(error_of([&] { good.post(Fingerprint::of("m"), big, sizeof big); }),
                HasSubstr("a record of 16 bytes, at most 8 were announced"));
    EXPECT_THAT(error_of([&] { good.wait_all_posted(1); }),
                HasSubstr("message 1 is waited for before this rank posted its own"));
    good.wait_all_posted(good.post(Fingerprint::of("m"), big, 8));
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Channel, DelaysChangeNoRecord) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    observe::set_chaos_for_testing({0.3, true, seed});
    const RankResults results = testing::run_thread_ranks(3, [seed](Rank& rank) {
      Channel channel(join(rank), "c", {sizeof(uint64_t), 2});
      for (uint64_t i = 0; i < 20; ++i) {
        const uint64_t value = seed * 100 + i;
        const uint64_t seq = channel.post(Fingerprint::of("m"), &value, sizeof value);
        for (int r = 2; r >= 0; --r) {
          channel.wait_posted(r, seq);
          uint64_t got = 0;
          std::memcpy(&got, channel.record(r, seq), sizeof got);
          EXPECT_EQ(got, value);
        }
        channel.done_reading(seq);
      }
    });
    EXPECT_TRUE(results.ok()) << results;
  }
  observe::set_chaos_for_testing({});
}

}  // namespace
}  // namespace trueshard::comm
