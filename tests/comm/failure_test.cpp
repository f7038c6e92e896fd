// SPDX-License-Identifier: BSD-3-Clause
// Field case 30: ranks that die, stop or leave. Ranks are processes here.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <ATen/ATen.h>

#include "plugin/comm/backend.h"
#include "tests/support/ranks.h"

namespace trueshard::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AnyOf;
using testing::Group;
using ::testing::HasSubstr;
using testing::Rank;
using testing::RankProcesses;
using testing::RankResults;

void all_reduce(const Group& group, at::Tensor tensor, bool async = false) {
  std::vector<at::Tensor> list{tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = async;
  group->allreduce(list, options)->wait();
}
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return testing::detail::text_of(error);
  }
  return "no error";
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}
double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The first error of the operation, and what must hold after it.
std::string fails_for_good(const Group& group, const std::function<void()>& call) {
  const std::string first = error_of(call);
  EXPECT_THAT(first, HasSubstr("group '" + group->getGroupName() + "'"));
  for (int i = 0; i < 2; ++i)
    EXPECT_THAT(error_of([&] { group->barrier()->wait(); }), HasSubstr("the group has failed, reported by rank"));
  EXPECT_EQ(group->getBackend(c10::DeviceType::CPU)->getError(), c10d::ErrorType::COMM_ERROR);
  return first;
}

TEST(Failure, ARankKilledBeforeTheFirstCallOnANewGroup) {
  RankProcesses processes(3, [](Rank& rank) {
    const Group world = rank.group(std::chrono::minutes(10));
    const Group fresh = rank.group(std::chrono::minutes(10));
    all_reduce(world, at::ones({1}));
    if (rank.rank == 1) {
      rank.marks[0] = 1;
      ::pause();
    }
    while (rank.marks[1] == 0) std::this_thread::sleep_for(milliseconds(1));
    return fails_for_good(fresh, [&] { all_reduce(fresh, at::ones({4})); });
  });
  ASSERT_TRUE(processes.wait_mark(0, 1));
  const std::string victim = std::to_string(processes.pid(1));
  processes.kill(1);
  processes.mark(1) = 1;
  const RankResults results = processes.wait();
  EXPECT_EQ(results[1].signal, SIGKILL);
  for (const size_t r : {0u, 2u}) {
    EXPECT_TRUE(results[r].ok()) << results;
    EXPECT_THAT(results[r].report,
                HasSubstr("rank 1 is gone (process " + victim + " has ended) and has not posted 'allreduce'"));
  }
}

TEST(Failure, ARankKilledInTheMiddleOfALargeAllReduce) {
  for (const bool async : {false, true}) {
    RankProcesses processes(3, [async](Rank& rank) {
      const Group group = rank.group(std::chrono::minutes(10));
      at::Tensor large = at::ones({3 << 20});
      return fails_for_good(group, [&] {
        for (int i = 0; i < 100000; ++i) {
          all_reduce(group, large, async);
          large.fill_(1);
          if (rank.rank == 1) rank.marks[0] = i + 1;
        }
      });
    });
    ASSERT_TRUE(processes.wait_mark(0, 3));
    processes.kill(1);
    const RankResults results = processes.wait();
    for (const size_t r : {0u, 2u}) {
      EXPECT_TRUE(results[r].ok()) << results;
      EXPECT_THAT(results[r].report, HasSubstr("rank 1 is gone (process"));
    }
  }
}

TEST(Failure, AStoppedRankIsATimeoutThatNamesItAndWaitingCostsNoCpu) {
  RankProcesses processes(3, [](Rank& rank) {
    const Group group = rank.group(milliseconds(2000));
    all_reduce(group, at::ones({1}));
    if (rank.rank == 1) {
      rank.marks[0] = 1;
      for (;;) ::pause();
    }
    while (rank.marks[1] == 0) std::this_thread::sleep_for(milliseconds(1));
    const double cpu = cpu_seconds(), clock = clock_seconds();
    std::string report = fails_for_good(group, [&] { all_reduce(group, at::ones({100000})); });
    EXPECT_LT(cpu_seconds() - cpu, 0.5 * (clock_seconds() - clock));
    return report;
  });
  ASSERT_TRUE(processes.wait_mark(0, 1));
  processes.stop(1);
  processes.mark(1) = 1;
  const RankResults survivors{{processes.wait(0), processes.wait(2)}};
  processes.kill(1);
  for (const auto& result : survivors) {
    EXPECT_TRUE(result.ok()) << survivors;
    EXPECT_THAT(result.report,
                HasSubstr("rank 1 has not posted 'allreduce' (message 2, float32, 100000 elements) after 2"));
  }
}

TEST(Failure, EachWaitOnFailedWorkThrowsAgainAndQueuedWorkFailsToo) {
  RankProcesses processes(3, [](Rank& rank) {
    const Group group = rank.group(std::chrono::minutes(10));
    all_reduce(group, at::ones({1}));
    if (rank.rank == 1) {
      rank.marks[0] = 1;
      ::pause();
    }
    std::vector<at::Tensor> a{at::ones({4})}, b{at::ones({4})};
    auto first = group->allreduce(a), second = group->allreduce(b);
    rank.marks[rank.rank == 0 ? 1 : 2] = 1;  // a call after the failure would throw itself
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(error_of([&] { first->wait(); }), HasSubstr("rank 1 is gone"));
      EXPECT_THAT(error_of([&] { second->wait(); }), HasSubstr("rank 1 is gone"));
    }
    EXPECT_TRUE(first->getFuture()->hasError() || (first->getFuture()->wait(), first->getFuture()->hasError()));
  });
  for (const int mark : {0, 1, 2}) ASSERT_TRUE(processes.wait_mark(mark, 1));
  processes.kill(1);
  const RankResults results = processes.wait();
  EXPECT_TRUE(results[0].ok() && results[2].ok()) << results;
}

TEST(Failure, AbortEndsTheWaitsOfAllRanks) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    all_reduce(group, at::ones({1}));
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(50));
      group->getBackend(c10::DeviceType::CPU)->abort();
      EXPECT_THAT(error_of([&] { all_reduce(group, at::ones({4})); }), HasSubstr("abort() was called"));
      return;
    }
    EXPECT_THAT(error_of([&] { all_reduce(group, at::ones({4})); }),
                HasSubstr("reported by rank 2: trueshard[rank 2/3]"));
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Failure, DestroyingAGroupWithWorkUnderWayEndsTheWorkWithAnError) {
  const RankResults results = testing::run_thread_ranks(2, [](Rank& rank) {
    Group group = rank.group(std::chrono::minutes(10));
    all_reduce(group, at::ones({1}));
    if (rank.rank == 1) {
      while (rank.marks[0] == 0) std::this_thread::sleep_for(milliseconds(1));
      EXPECT_THAT(error_of([&] { all_reduce(group, at::ones({2})); }),
                  AnyOf(HasSubstr("the group was destroyed while an operation was under way"),
                        HasSubstr("has closed the group")));
      return;
    }
    std::vector<at::Tensor> a{at::ones({2})}, b{at::ones({3})};  // the other rank takes part in neither
    auto first = group->allreduce(a), second = group->allreduce(b);
    group.reset();
    rank.marks[0] = 1;
    EXPECT_THAT(error_of([&] { first->wait(); }), HasSubstr("the group was destroyed"));
    EXPECT_THAT(error_of([&] { second->wait(); }), HasSubstr("the group was destroyed before this operation began"));
    EXPECT_TRUE(first->isCompleted() && second->isCompleted());
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Failure, AfterShutdownCallsSaySo) {
  const RankResults results = testing::run_threads(2, [](int, const Group& group) {
    std::vector<at::Tensor> list{at::ones({1000})};
    auto work = group->allreduce(list);
    group->getBackend(c10::DeviceType::CPU)->shutdown();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(list[0][999].item<float>(), 2);
    EXPECT_THAT(error_of([&] { all_reduce(group, at::ones({4})); }),
                HasSubstr("the group was shut down; make a new group"));
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Failure, ATimeoutOfOneCallOrOfTheGroupIsKept) {
  const RankResults results = testing::run_threads(2, [](int rank, const Group& group) {
    all_reduce(group, at::ones({1}));
    if (rank == 1) {
      while (group->getBackend(c10::DeviceType::CPU)->getError() == c10d::ErrorType::SUCCESS)
        std::this_thread::sleep_for(milliseconds(5));
      return;
    }
    group->getBackend(c10::DeviceType::CPU)->setTimeout(std::chrono::minutes(20));
    c10d::AllreduceOptions options;
    options.timeout = milliseconds(150);
    std::vector<at::Tensor> list{at::ones({4})};
    EXPECT_THAT(error_of([&] { group->allreduce(list, options)->wait(); }),
                HasSubstr("rank 1 has not posted 'allreduce' (message 2, float32, 4 elements) after 1"));
  });
  EXPECT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::comm
