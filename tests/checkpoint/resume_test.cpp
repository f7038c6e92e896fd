// SPDX-License-Identifier: BSD-3-Clause
// Exact resume: 3 steps + save + load + 3 steps are 6 steps, bit for bit, with every rank's random numbers.
#include <gmock/gmock.h>

#include "tests/checkpoint/files.h"
#include "tests/checkpoint/training.h"
#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

using ::testing::HasSubstr;

ShardOptions options_of(int stage) { return ShardOptions().stage(static_cast<Stage>(stage)).bucket_bytes(600); }

// Ranks are processes: each has random numbers of its own.
std::vector<std::string> reports(const RankResults& results) {
  EXPECT_TRUE(results.ok()) << results;
  std::vector<std::string> reports;
  for (const auto& result : results) reports.push_back(result.report);
  return reports;
}

class ExactResume : public ::testing::TestWithParam<int> {};

TEST_P(ExactResume, InFreshProcesses) {
  const TemporaryFolder folder;
  const auto options = options_of(GetParam());
  const auto whole = reports(run_processes(3, [&](int, const Group& group) {
    TrainingRun run(group, options);
    for (int i = 0; i < 6; ++i) run.one_step();
    return run.digest();
  }));
  reports(run_processes(3, [&](int, const Group& group) {
    TrainingRun run(group, options);
    for (int i = 0; i < 3; ++i) run.one_step();
    save_checkpoint(folder / "c", run.state);
  }));
  const auto resumed = reports(run_processes(3, [&](int, const Group& group) {
    TrainingRun run(group, options, 77);  // other weights, other random numbers
    load_checkpoint(folder / "c", run.state);
    EXPECT_EQ(run.step, 3);
    for (int i = 0; i < 3; ++i) run.one_step();
    return run.digest();
  }));
  EXPECT_EQ(resumed, whole);
  EXPECT_NE(whole[0], whole[1]) << "each rank has random numbers of its own";
}

TEST_P(ExactResume, InTheSameProcessAfterGoingOn) {
  const TemporaryFolder folder;
  const auto options = options_of(GetParam());
  const auto results = run_processes(3, [&](int, const Group& group) {
    TrainingRun run(group, options);
    for (int i = 0; i < 3; ++i) run.one_step();
    save_checkpoint(folder / "c", run.state);
    for (int i = 0; i < 3; ++i) run.one_step();
    const auto first = run.digest();
    load_checkpoint(folder / "c", run.state);
    EXPECT_EQ(run.step, 3);
    for (int i = 0; i < 3; ++i) run.one_step();
    EXPECT_EQ(run.digest(), first);
  });
  EXPECT_TRUE(results.ok()) << results;
}

INSTANTIATE_TEST_SUITE_P(Stages, ExactResume, ::testing::Values(0, 1, 2, 3));

TEST(ExactResumeAfterASave, ANewerSaveOfTheSameNameIsTheOneThatLoads) {
  const TemporaryFolder folder;
  const auto results = run_processes(3, [&](int, const Group& group) {
    TrainingRun run(group, options_of(2));
    run.one_step();
    save_checkpoint(folder / "c", run.state);
    run.one_step();
    save_checkpoint(folder / "c", run.state);
    const auto saved = run.digest();
    run.one_step();
    load_checkpoint(folder / "c", run.state);
    EXPECT_EQ(run.digest(), saved);
  });
  EXPECT_TRUE(results.ok()) << results;
}

TEST(ExactResume16Bit, MastersBelowTheLastPlaceComeBackAndShowRounded) {
  const TemporaryFolder folder;
  const auto results = run_threads(3, [&](int, const Group& group) {
    const auto options = ShardOptions().mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
    const float value = 1.0f + std::ldexp(1.0f, -11);  // not a bf16 number
    const auto make = [&](float from) {
      auto module = toy({std::vector<float>(50, from), {from}});
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.1), group, options);
      return std::pair(module, std::move(optimizer));
    };
    auto [module, optimizer] = make(value);
    CheckpointState state;
    state.add("trainer", *optimizer);
    save_checkpoint(folder / "c", state);
    auto [other, other_optimizer] = make(0.0f);
    CheckpointState other_state;
    other_state.add("trainer", *other_optimizer);
    load_checkpoint(folder / "c", other_state);
    EXPECT_EQ(other->tensors[0].scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(same_bits(other->tensors[0], torch::full({50}, value).to(torch::kBFloat16))) << other->tensors[0];
    const auto whole = full_state_dict(*other_optimizer);
    EXPECT_TRUE(same_bits(whole["p0"], torch::full({50}, value)));
  });
  EXPECT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::testing
