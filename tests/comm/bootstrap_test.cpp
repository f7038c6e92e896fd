// SPDX-License-Identifier: BSD-3-Clause
// The launch environment, process groups from it, and the TRUESHARD_* variables.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <ATen/ATen.h>
#include <fstream>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "plugin/comm/backend.h"
#include "plugin/comm/launch_environment.h"
#include "plugin/observe/trace.h"
#include "tests/support/ranks.h"

namespace trueshard::comm {
namespace {

using testing::Group;
using ::testing::HasSubstr;
using testing::Rank;
using testing::RankResults;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return testing::detail::text_of(error);
  }
  return "no error";
}
std::string refusal(const Variables& variables) {
  return error_of([&] { parse_launch(variables); });
}

TEST(Launch, NothingSetIsOneRankWithoutAStore) {
  const Launch launch = parse_launch({});
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.size, 1);
  EXPECT_EQ(launch.store, Launch::Store::kNone);
  // Inside a Slurm allocation but not in a step: an interactive shell.
  EXPECT_EQ(parse_launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "7"}}).size, 1);
}

TEST(Launch, TorchrunComesFirstAndItsAgentKeepsTheStore) {
  Variables variables{{"RANK", "0"},
                      {"WORLD_SIZE", "4"},
                      {"MASTER_ADDR", "10.0.0.1"},
                      {"MASTER_PORT", "29400"},
                      {"OMPI_COMM_WORLD_RANK", "3"},
                      {"OMPI_COMM_WORLD_SIZE", "8"}};
  Launch launch = parse_launch(variables);
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.size, 4);
  EXPECT_EQ(launch.store, Launch::Store::kTcp);
  EXPECT_EQ(launch.host, "10.0.0.1");
  EXPECT_EQ(launch.port, 29400);
  EXPECT_TRUE(launch.host_store);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "2";
  const Launch restarted = parse_launch(variables);
  EXPECT_FALSE(restarted.host_store);
  EXPECT_EQ(restarted.prefix, "trueshard/attempt_2");
  variables["RANK"] = "1";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_FALSE(parse_launch(variables).host_store);
}

TEST(Launch, OpenMpiWithoutAMasterUsesAFileNamedByTheJob) {
  Variables variables{
      {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "3"}, {"OMPI_MCA_orte_hnp_uri", "123.0;tcp://1"}};
  const Launch launch = parse_launch(variables);
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.size, 3);
  EXPECT_EQ(launch.store, Launch::Store::kFile);
  EXPECT_THAT(launch.job, ::testing::MatchesRegex("mpi-[0-9a-f]+"));
  variables["OMPI_MCA_orte_hnp_uri"] = "124.0;tcp://1";
  EXPECT_NE(parse_launch(variables).job, launch.job);
  variables.erase("OMPI_MCA_orte_hnp_uri");
  EXPECT_THAT(
      refusal(variables),
      HasSubstr("started by Open MPI (OMPI_COMM_WORLD_* is set) without MASTER_ADDR, but PMIX_NAMESPACE is not set"));
  variables["PMIX_NAMESPACE"] = "ns";
  EXPECT_EQ(parse_launch(variables).store, Launch::Store::kFile);
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_THAT(refusal(variables), HasSubstr("on several hosts, but MASTER_ADDR is not set"));
  variables["MASTER_ADDR"] = "h";
  EXPECT_THAT(refusal(variables), HasSubstr("MASTER_ADDR is set, but MASTER_PORT is not set"));
  variables["MASTER_PORT"] = "1234";
  EXPECT_EQ(parse_launch(variables).store, Launch::Store::kTcp);
}

TEST(Launch, SlurmCountsOnlyInsideAStep) {
  Variables variables{{"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "2"},
                      {"SLURM_NTASKS", "4"},
                      {"SLURM_JOB_ID", "77"},
                      {"SLURM_NNODES", "1"}};
  Launch launch = parse_launch(variables);
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.size, 4);
  EXPECT_EQ(launch.store, Launch::Store::kFile);
  EXPECT_EQ(launch.job, "slurm-77.0.0");
  variables["SLURM_STEP_ID"] = "1";
  EXPECT_EQ(parse_launch(variables).job, "slurm-77.1.0");
  variables["SLURM_NNODES"] = "2";
  EXPECT_THAT(refusal(variables), HasSubstr("on several nodes, but MASTER_ADDR is not set"));
  variables.erase("SLURM_PROCID");
  EXPECT_THAT(refusal(variables), HasSubstr("SLURM_STEP_ID is set), but SLURM_PROCID is not set"));
}

TEST(Launch, WhatIsMissingOrWrongIsNamed) {
  EXPECT_THAT(refusal({{"RANK", "0"}}), HasSubstr("RANK is set, but WORLD_SIZE is not set"));
  EXPECT_THAT(refusal({{"WORLD_SIZE", "2"}}), HasSubstr("WORLD_SIZE is set, but RANK is not set"));
  EXPECT_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("but MASTER_ADDR is not set"));
  EXPECT_THAT(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK is '2', expected a whole number from 0 to 1"));
  EXPECT_THAT(refusal({{"RANK", "a"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK is 'a'"));
  EXPECT_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE is '0'"));
  EXPECT_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}}),
              HasSubstr("MASTER_PORT is '70000'"));
  EXPECT_THAT(refusal({{"OMPI_COMM_WORLD_RANK", "0"}}), HasSubstr("OMPI_COMM_WORLD_SIZE is not set"));
}

int free_port() {
  const int file = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::bind(file, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  socklen_t length = sizeof address;
  ::getsockname(file, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(file);
  return ntohs(address.sin_port);
}

// Two groups after one another, and one all-reduce on each.
void use_two_groups(const Rank& rank) {
  for (int i = 0; i < 2; ++i) {
    const Group group = init_process_group(ProcessGroupOptions().timeout(std::chrono::seconds(60)));
    EXPECT_EQ(group->getRank(), rank.rank);
    EXPECT_EQ(group->getSize(), rank.world);
    std::vector<at::Tensor> list{at::full({3}, rank.rank + 1.0)};
    group->allreduce(list)->wait();
    EXPECT_EQ(list[0][2].item<float>(), static_cast<float>(rank.world * (rank.world + 1) / 2));
    EXPECT_EQ(transport_of(*group)->size(), rank.world);
  }
}

TEST(Bootstrap, TorchrunsVariablesMakeAGroup) {
  const std::string port = std::to_string(free_port());
  const RankResults results = testing::run_process_ranks(3, [&port](Rank& rank) {
    ::setenv("RANK", std::to_string(rank.rank).c_str(), 1);
    ::setenv("WORLD_SIZE", "3", 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", port.c_str(), 1);
    use_two_groups(rank);
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Bootstrap, OpenMpisVariablesMakeAGroupThroughAFile) {
  const std::string job = "test." + std::to_string(::getpid());
  const RankResults results = testing::run_process_ranks(3, [&job](Rank& rank) {
    ::setenv("OMPI_COMM_WORLD_RANK", std::to_string(rank.rank).c_str(), 1);
    ::setenv("OMPI_COMM_WORLD_SIZE", "3", 1);
    ::setenv("PMIX_NAMESPACE", job.c_str(), 1);
    use_two_groups(rank);
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(Bootstrap, WithoutALauncherTheWorldIsOneRank) {
  const Group group = init_process_group();
  EXPECT_EQ(group->getSize(), 1);
  std::vector<at::Tensor> list{at::full({3}, 7.0f)};
  group->allreduce(list)->wait();
  EXPECT_EQ(list[0][0].item<float>(), 7);
  EXPECT_TRUE(c10d::resolve_process_group(group->getGroupName()) == group);
  const Group second = init_process_group();
  EXPECT_NE(second->getGroupName(), group->getGroupName());
}

TEST(Bootstrap, WrongArgumentsAreNamed) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(error_of([&] { init_process_group(store, 2, 2); }),
              HasSubstr("rank 2 of 2 ranks is not possible, expected 0 <= rank < world_size"));
  EXPECT_THAT(error_of([&] { init_process_group(nullptr, 0, 2); }),
              HasSubstr("2 ranks need a store that they all share"));
  EXPECT_THAT(
      error_of([&] { init_process_group(store, 0, 1, ProcessGroupOptions().timeout(std::chrono::milliseconds(0))); }),
      HasSubstr("the timeout is 0 ms, expected more than 0"));
  EXPECT_THAT(error_of([&] { init_process_group(store, 0, 300); }), HasSubstr("a group has at most 255 ranks"));
}

TEST(Chaos, TheVariableIsReadFieldByField) {
  const observe::ChaosOptions all = observe::parse_chaos("delay_ms=2.5,poison=1,seed=7");
  EXPECT_EQ(all.delay_ms, 2.5);
  EXPECT_TRUE(all.poison);
  EXPECT_EQ(all.seed, 7u);
  EXPECT_EQ(observe::parse_chaos("").delay_ms, 0);
  EXPECT_THAT(error_of([] { observe::parse_chaos("delay=3"); }),
              HasSubstr("unknown field 'delay', expected delay_ms, poison or seed"));
  EXPECT_THAT(error_of([] { observe::parse_chaos("delay_ms=fast"); }),
              HasSubstr("field 'delay_ms' is 'fast', expected a number"));
  EXPECT_THAT(error_of([] { observe::parse_chaos("seed=-1"); }), HasSubstr("field 'seed' is '-1'"));
}

TEST(Chaos, PoisonedMemoryIsNan) {
  observe::set_chaos_for_testing({0, true, 0});
  float values[3] = {1, 2, 3};
  observe::chaos_poison(values, 2 * sizeof(float));
  EXPECT_TRUE(std::isnan(values[0]) && std::isnan(values[1]));
  EXPECT_EQ(values[2], 3);
  observe::set_chaos_for_testing({});
  observe::chaos_poison(values + 2, sizeof(float));
  EXPECT_EQ(values[2], 3);
}

TEST(Trace, OneLinePerCollectiveOfEachRank) {
  const std::string path = ::testing::TempDir() + "trueshard-trace-" + std::to_string(::getpid());
  const RankResults results = testing::run_process_ranks(3, [&path](Rank& rank) {
    ::setenv("TRUESHARD_TRACE", path.c_str(), 1);
    const Group group = rank.group(std::chrono::seconds(60), "a \"quoted\" name");
    std::vector<at::Tensor> list{at::ones({300000}, at::kBFloat16)};
    group->allreduce(list)->wait();
    group->barrier()->wait();
  });
  EXPECT_TRUE(results.ok()) << results;
  std::ifstream file(path);
  int lines = 0, reductions = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    EXPECT_EQ(line.front(), '{');
    EXPECT_EQ(line.back(), '}');
    EXPECT_THAT(line, HasSubstr(R"("group":"a \"quoted\" name","channel":"collectives")"));
    if (line.find(R"("operation":"allreduce","dtype":"bfloat16","rank":)") == std::string::npos) continue;
    EXPECT_THAT(line, HasSubstr(R"("sequence":1,"elements":300000,"start_ns":)"));
    ++reductions;
  }
  EXPECT_EQ(lines, 6);
  EXPECT_EQ(reductions, 3);
  std::filesystem::remove(path);
}

TEST(Trace, AFileThatCannotBeWrittenIsAnErrorWhenTheGroupIsMade) {
  const RankResults results = testing::run_process_ranks(1, [](Rank& rank) {
    ::setenv("TRUESHARD_TRACE", "/no/such/folder/file", 1);
    rank.group();
  });
  EXPECT_THAT(results[0].error,
              HasSubstr("TRUESHARD_TRACE: cannot open '/no/such/folder/file' for writing: No such file or directory"));
}

}  // namespace
}  // namespace trueshard::comm
