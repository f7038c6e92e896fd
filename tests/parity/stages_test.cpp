// SPDX-License-Identifier: BSD-3-Clause
// A real model, with everything a loop may use: the stage, the bucket size, overlap and timing change no bit
// (docs/numerics.md, section 1, properties 1-4).
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "plugin/observe/trace.h"
#include "tests/parity/nets.h"
#include "tests/support/ranks.h"

namespace trueshard::testing {
namespace {

struct Recipe {
  Stage stage = Stage::Zero2;
  bool mixed = false;  // bf16 policy with scaler, clip, schedule, accumulation and a deferred pass; else plain fp32
  int64_t bucket_bytes = 1 << 20;
  bool overlap = true;
  int steps = 4;
  int64_t unit_bytes = 600;                              // ZeRO-3: several units
  std::optional<int64_t> resident_bytes = std::nullopt;  // ZeRO-3
  int64_t prefetch_units = 0;                            // ZeRO-3
  bool share_parameters = true;
};
ShardOptions options_of(const Recipe& run) {
  auto options = ShardOptions().stage(run.stage).bucket_bytes(run.bucket_bytes).overlap(run.overlap);
  options.unit_bytes(run.unit_bytes).resident_bytes(run.resident_bytes).prefetch_units(run.prefetch_units);
  options.share_parameters(run.share_parameters);
  if (run.mixed) options.mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
  return options;
}

void plain_steps(const Trainee& model, ShardedOptimizer& optimizer, int rank, const Recipe& run) {
  const int world = optimizer.group()->getSize();
  for (int step = 0; step < run.steps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 2; ++pass) loss_of(model, batch(step, pass * world + rank)).backward();
    optimizer.step();
  }
}

// Three passes a step, the first one deferred; the scale grows on the way.
std::string mixed_steps(const Trainee& model, ShardedOptimizer& optimizer, int rank, const Recipe& run) {
  const int world = optimizer.group()->getSize();
  ShardedGradScaler scaler(optimizer.group(), GradScalerOptions().init_scale(1024).growth_interval(2));
  torch::optim::StepLR schedule(optimizer, 2, 0.5);
  std::string norms;
  for (int step = 0; step < run.steps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 3; ++pass) {
      std::optional<NoSyncGuard> later;
      if (pass == 0) later.emplace(optimizer);
      scaler.scale(loss_of(model, batch(step, pass * world + rank)) / 3).backward();
    }
    scaler.unscale_(optimizer);
    const double norm = clip_grad_norm_(optimizer, 0.5);
    EXPECT_GT(norm, 0.5) << "the clip must do something here";
    norms += ' ' + std::to_string(digest({torch::tensor(norm, torch::kDouble)}));
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    schedule.step();
  }
  EXPECT_EQ(scaler.get_scale(), 1024.0 * (1 << (run.steps / 2)));
  return norms;
}

// Compute copies, masters, and the norms on the way.
std::string train(int rank, const Group& group, const Recipe& run) {
  const Trainee model = eager_net();
  auto sharded = model.shard(std::make_unique<torch::optim::AdamW>(model.parameters, torch::optim::AdamWOptions(1e-2)),
                             group, options_of(run));
  std::string norms;
  if (run.mixed) {
    norms = mixed_steps(model, *sharded, rank, run);
  } else {
    plain_steps(model, *sharded, rank, run);
  }
  Parameters masters;
  for (const auto& item : full_state_dict(*sharded)) masters.push_back(item.value());
  masters.resize(model.parameters.size());  // batch norm's statistics, which follow, are each rank's own
  EXPECT_NE(first_difference(masters, eager_net().parameters), -1) << "nothing was learnt";
  return std::to_string(digest(model.parameters)) + ' ' + std::to_string(digest(masters)) + norms;
}

std::string on_threads(int world, const Recipe& run) {
  const auto results = run_threads(world, [&](int rank, const Group& group) { return train(rank, group, run); });
  EXPECT_TRUE(results.ok()) << results;
  for (const auto& result : results) EXPECT_EQ(result.report, results[0].report) << "ranks differ, world " << world;
  return results[0].report;
}

TEST(ARealModel, HasTheSameBitsOnProcessesAsOnThreads) {  // first: processes are forked before threads run
  for (const bool mixed : {false, true}) {
    const Recipe run{.mixed = mixed, .bucket_bytes = 600};
    const auto processes = run_processes(3, [&](int rank, const Group& group) { return train(rank, group, run); });
    ASSERT_TRUE(processes.ok()) << processes;
    const auto threads = on_threads(3, run);
    for (const auto& process : processes) EXPECT_EQ(process.report, threads);
  }
}

class ARealModelOn : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ARealModelOn, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(ARealModelOn, HasTheSameBitsInEveryStage) {
  for (const bool mixed : {false, true}) {
    const auto expected = on_threads(GetParam(), {.stage = Stage::Replicated, .mixed = mixed});
    EXPECT_FALSE(expected.empty());
    for (const auto stage : {Stage::Zero1, Stage::Zero2, Stage::Zero3}) {
      for (const bool share : {false, true})
        EXPECT_EQ(on_threads(GetParam(), {.stage = stage, .mixed = mixed, .share_parameters = share}), expected)
            << "mixed " << mixed << " share " << share;
    }
  }
}

TEST(ARealModel, HasTheSameBitsForEveryBucketSizeAndMode) {
  const auto expected = on_threads(3, {.stage = Stage::Replicated, .mixed = true});
  for (const int64_t bucket_bytes : {int64_t{1}, int64_t{64}, int64_t{1000}, int64_t{1} << 40}) {
    for (const bool overlap : {false, true}) {
      for (const auto stage : {Stage::Zero1, Stage::Zero2, Stage::Zero3}) {
        EXPECT_EQ(on_threads(3, {.stage = stage, .mixed = true, .bucket_bytes = bucket_bytes, .overlap = overlap}),
                  expected)
            << "bucket " << bucket_bytes << " overlap " << overlap;
      }
    }
  }
}

TEST(ARealModel, HasTheSameBitsForEveryUnitSizeAndResidencyBudget) {
  for (const bool mixed : {false, true}) {
    const auto expected = on_threads(3, {.stage = Stage::Replicated, .mixed = mixed});
    for (const int64_t unit_bytes : {int64_t{1}, int64_t{600}, int64_t{1} << 40}) {
      for (const int64_t resident_bytes : {int64_t{0}, int64_t{2500}, int64_t{1} << 40}) {
        for (const int64_t prefetch_units : {0, 2}) {
          EXPECT_EQ(on_threads(3, {.stage = Stage::Zero3,
                                   .mixed = mixed,
                                   .unit_bytes = unit_bytes,
                                   .resident_bytes = resident_bytes,
                                   .prefetch_units = prefetch_units,
                                   .share_parameters = prefetch_units > 0}),
                    expected)
              << "unit " << unit_bytes << " budget " << resident_bytes << " prefetch " << prefetch_units;
        }
      }
    }
  }
}

// The weights of a plain fp32 run are those of the recursion in docs/numerics.md, computed by one process.
TEST(ARealModel, EqualsTheTreeComputedByOneProcess) {
  for (const int world : {3, 5}) {
    Reference reference(eager_net(), world, 2);
    torch::optim::AdamW plain(reference.masters, torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      reference.gradients(step);
      plain.step();
      reference.publish();
    }
    const auto expected = std::to_string(digest(reference.masters));
    EXPECT_EQ(on_threads(world, {.bucket_bytes = 300}), expected + ' ' + expected);
  }
}

// Field case 1: bucket sizes, overlap, 20 repeats.
std::vector<uint64_t> repeated_gradients(const Group& group, torch::Dtype dtype, const Recipe& run) {
  const std::vector<int64_t> sizes{7, 1, 5, 64};
  std::vector<torch::Tensor> values;
  for (size_t i = 0; i < sizes.size(); ++i) values.push_back(random_values(static_cast<int64_t>(i), {sizes[i]}, dtype));
  Toy module(values);
  auto params = module->parameters();
  auto optimizer = shard(*module, torch::optim::SGD(params, 0.0), group, options_of(run));
  std::vector<uint64_t> digests;
  for (int repeat = 0; repeat < 20; ++repeat) {
    optimizer->zero_grad();
    std::vector<torch::Tensor> gradients;
    for (size_t i = 0; i < sizes.size(); ++i)
      gradients.push_back(random_values(100 * (group->getRank() + 1) + static_cast<int64_t>(i), {sizes[i]}, dtype));
    backward_with(params, gradients);
    std::vector<torch::Tensor> whole;
    for (size_t i = 0; i < sizes.size(); ++i) whole.push_back(whole_gradient(*optimizer, i));
    digests.push_back(digest(whole));
  }
  return digests;
}

TEST(FieldCase01, BucketSizesOverlapAndRepeatsGiveOneDigest) {
  for (const int world : {2, 3, 4}) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      std::set<uint64_t> digests;
      std::mutex mutex;
      for (const int64_t elements : {int64_t{1}, int64_t{8}, int64_t{64}, int64_t{1} << 30}) {
        for (const bool overlap : {false, true}) {
          const Recipe run{.bucket_bytes = elements * static_cast<int64_t>(c10::elementSize(dtype)),
                           .overlap = overlap};
          const auto results = run_threads(world, [&](int, const Group& group) {
            const auto each = repeated_gradients(group, dtype, run);
            const std::lock_guard<std::mutex> lock(mutex);
            digests.insert(each.begin(), each.end());
          });
          ASSERT_TRUE(results.ok()) << results;
        }
      }
      EXPECT_EQ(digests.size(), 1u) << "world " << world << " dtype " << dtype;
    }
  }
}

// Random delays at every point of the transport, and returned buffers filled with NaN: 200 seeds, one result.
class Chaos {
 public:
  explicit Chaos(uint64_t seed) { observe::set_chaos_for_testing({.delay_ms = 0.3, .poison = true, .seed = seed}); }
  ~Chaos() { observe::set_chaos_for_testing({}); }
};

std::string tiny_run(int rank, const Group& group, Stage stage, int64_t bucket_bytes) {
  const std::vector<int64_t> sizes{7, 1, 5, 64};
  std::vector<torch::Tensor> values;
  for (const int64_t size : sizes) values.push_back(random_values(size, {size}));
  Toy module(values);
  auto params = module->parameters();
  auto optimizer = shard(
      *module, torch::optim::AdamW(params, torch::optim::AdamWOptions(1e-2)), group,
      ShardOptions().stage(stage).bucket_bytes(bucket_bytes).unit_bytes(16).prefetch_units(bucket_bytes == 16 ? 1 : 0));
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<torch::Tensor> gradients;
      for (size_t i = 0; i < params.size(); ++i)
        gradients.push_back(random_values(100 * step + 10 * pass + rank + 1000 * sizes[i], params[i].sizes()));
      backward_with(params, gradients);
    }
    clip_grad_norm_(*optimizer, 1.0);
    optimizer->step();
  }
  EXPECT_FALSE(torch::cat(params).isnan().any().item<bool>());
  return std::to_string(digest(params));
}

TEST(Timing, TwoHundredSeedsOfDelaysAndPoisonGiveOneDigest) {
  const auto run = [](Stage stage, int64_t bucket_bytes) {
    const auto results =
        run_threads(3, [&](int rank, const Group& group) { return tiny_run(rank, group, stage, bucket_bytes); });
    EXPECT_TRUE(results.ok()) << results;
    for (const auto& result : results) EXPECT_EQ(result.report, results[0].report);
    return results[0].report;
  };
  const auto calm = run(Stage::Zero2, 16);
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const Chaos chaos(seed);
    const auto stage = all_stages()[seed % 4];
    ASSERT_EQ(run(stage, seed % 2 ? 16 : 1 << 20), calm) << "seed " << seed;
  }
}

}  // namespace
}  // namespace trueshard::testing
