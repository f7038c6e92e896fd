// SPDX-License-Identifier: BSD-3-Clause
// The bits of a reduced gradient are a function of the list of leaves only (docs/numerics.md, section 1).
#include <gtest/gtest.h>

#include "tests/support/ranks.h"
#include "tests/support/toy.h"

namespace trueshard::testing {
namespace {

// Field case 1's shapes, a few larger and odd ones, one empty, one transposed.
std::vector<torch::Tensor> shapes(torch::Dtype dtype) {
  return {random_values(1, {7}, dtype),          random_values(2, {1}, dtype),      random_values(3, {5}, dtype),
          random_values(4, {64}, dtype),         random_values(5, {33, 70}, dtype), torch::empty({0}, dtype),
          random_values(6, {19, 31}, dtype).t(), random_values(7, {1031}, dtype)};
}

struct Config {
  Stage stage;
  int64_t bucket_bytes;
  bool overlap;
};
std::vector<Config> configs() {
  std::vector<Config> all;
  for (const auto stage : all_stages()) {
    for (const int64_t bucket : {int64_t{1}, int64_t{32}, int64_t{4096}, int64_t{1} << 30})
      all.push_back({stage, bucket, bucket != 32});
  }
  return all;
}

torch::Tensor leaf_of(int64_t leaf, size_t parameter, const torch::Tensor& like) {
  return random_values(1000 * leaf + static_cast<int64_t>(parameter), like.sizes(), like.scalar_type());
}

// Runs `passes` passes for `repeats` steps on `world` rank threads and returns rank 0's digest of all whole gradients
// of the last step, after comparing them with the tree.
void expect_tree(int world, int passes, torch::Dtype dtype, const Config& config) {
  const int leaves = world * passes;
  const auto results = run_threads(world, [&](int rank, const Group& group) {
    Toy module(shapes(dtype));
    std::vector<torch::Tensor> params = module->parameters();
    auto options = ShardOptions()
                       .stage(config.stage)
                       .bucket_bytes(config.bucket_bytes)
                       .overlap(config.overlap)
                       .gradient_divide_factor(leaves);
    auto optimizer = shard(*module, torch::optim::SGD(params, 0.0), group, options);
    for (int step = 0; step < 2; ++step) {  // the second step overlaps
      optimizer->zero_grad();
      for (int pass = 0; pass < passes; ++pass) {
        std::vector<torch::Tensor> gradients;
        for (size_t i = 0; i < params.size(); ++i) gradients.push_back(leaf_of(pass * world + rank, i, params[i]));
        backward_with(params, gradients);
      }
      for (size_t i = 0; i < params.size(); ++i) {
        std::vector<torch::Tensor> all;
        for (int leaf = 0; leaf < leaves; ++leaf) all.push_back(leaf_of(leaf, i, params[i]));
        auto expected = tree(all) / static_cast<double>(leaves);
        const auto got = whole_gradient(*optimizer, i);
        // Shards are in the parameter's memory order.
        const auto ordered = expected.numel() == 0
                                 ? expected.reshape({-1})
                                 : torch::empty_strided(params[i].sizes(), params[i].strides(), expected.options())
                                       .copy_(expected)
                                       .as_strided({expected.numel()}, {1});
        EXPECT_TRUE(same_bits(got, ordered))
            << "rank " << rank << " step " << step << " parameter " << i << " bucket " << config.bucket_bytes
            << " stage " << static_cast<int>(config.stage) << " differs in "
            << (got.defined() ? got.ne(ordered).sum().item<int64_t>() : -1);
      }
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

class ReducedGradient : public ::testing::TestWithParam<int> {};

TEST_P(ReducedGradient, IsTheCanonicalTreeInEveryStageBucketSizeAndMode) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const auto& config : configs()) expect_tree(GetParam(), 1, dtype, config);
  }
}
TEST_P(ReducedGradient, IsTheCanonicalTreeOverSeveralPasses) {
  for (const int passes : {2, 3, 5}) {
    for (const auto stage : all_stages()) expect_tree(GetParam(), passes, torch::kBFloat16, {stage, 300, true});
  }
}
TEST_P(ReducedGradient, OfFp64AndFp16ParametersToo) {
  for (const auto dtype : {torch::kDouble, torch::kHalf}) expect_tree(GetParam(), 3, dtype, {Stage::Zero2, 300, true});
}
INSTANTIATE_TEST_SUITE_P(Ranks, ReducedGradient, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST(ReducedGradientOnProcesses, IsTheSameAsOnThreads) {
  for (const int world : {3, 4}) {
    const auto body = [&](int rank, const Group& group) {
      Toy module(shapes(torch::kBFloat16));
      auto params = module->parameters();
      auto optimizer = shard(*module, torch::optim::SGD(params, 0.0), group, ShardOptions().bucket_bytes(300));
      std::string text;
      for (int pass = 0; pass < 3; ++pass) {
        std::vector<torch::Tensor> gradients;
        for (size_t i = 0; i < params.size(); ++i) gradients.push_back(leaf_of(pass * world + rank, i, params[i]));
        backward_with(params, gradients);
      }
      std::vector<torch::Tensor> whole;
      for (size_t i = 0; i < params.size(); ++i) whole.push_back(whole_gradient(*optimizer, i));
      return std::to_string(digest(whole));
    };
    const auto processes = run_processes(world, body);
    ASSERT_TRUE(processes.ok()) << processes;
    const auto threads = run_threads(world, body);
    ASSERT_TRUE(threads.ok()) << threads;
    for (int r = 0; r < world; ++r)
      EXPECT_EQ(processes[r].report, threads[0].report) << "rank " << r << " of " << world;
  }
}

// Field case 2: 16-bit gradients are summed in fp32 over ranks and passes.
TEST(FieldCase02, SmallTermsSurviveNextToLargeOnes) {
  const auto run = [](int world, torch::Dtype dtype, const std::vector<std::vector<float>>& per_rank_passes) {
    float result = 0;
    const auto results = run_threads(world, [&](int rank, const Group& group) {
      Toy module = toy({{0.0f}}, dtype);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
      for (const float value : per_rank_passes[rank]) backward_with(module, {{value}});
      const auto gradient = whole_gradient(*optimizer, 0);
      EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
      if (rank == 0) result = gradient.item<float>();
    });
    EXPECT_TRUE(results.ok()) << results;
    return result;
  };
  EXPECT_EQ(run(4, torch::kBFloat16, {{256}, {1}, {1}, {1}}), 64.75f);
  EXPECT_EQ(run(4, torch::kHalf, {{2048}, {1}, {1}, {1}}), 512.75f);
  EXPECT_EQ(run(1, torch::kBFloat16, {{256, 1, -256}}), 1.0f);
  EXPECT_EQ(run(1, torch::kBFloat16, {std::vector<float>(512, 1.0f)}), 512.0f);
}

// Field case 4: the mean of what fits in fp16 is finite and not zero.
TEST(FieldCase04, LargeAndTinyMeansSurvive) {
  for (const int world : {3, 4}) {
    const auto results = run_threads(world, [&](int rank, const Group& group) {
      Toy module = toy({{0.0f, 0.0f, 0.0f}}, torch::kHalf);
      auto optimizer = shard(*module, torch::optim::SGD(module->parameters(), 0.0), group);
      const float tiny = std::ldexp(1.0f, -24);
      backward_with(module, {{30000.0f, tiny, rank == 0 ? 60000.0f : -60000.0f}});
      const auto gradient = whole_gradient(*optimizer, 0);
      EXPECT_EQ(gradient[0].item<float>(), 30000.0f);
      EXPECT_EQ(gradient[1].item<float>(), tiny);
      EXPECT_TRUE(std::isfinite(gradient[2].item<float>()));
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

// Property 6: the same leaves in the same order, however they are spread over ranks and passes.
TEST(Factorisation, RanksTimesPassesGiveTheSameWeights) {
  std::vector<uint64_t> digests;
  for (const auto& [world, passes] : std::vector<std::pair<int, int>>{{1, 6}, {2, 3}, {3, 2}, {6, 1}}) {
    const auto results = run_threads(world, [&, w = world, n = passes](int rank, const Group& group) {
      Toy module(shapes(torch::kFloat));
      auto params = module->parameters();
      auto optimizer = shard(*module, torch::optim::AdamW(params, torch::optim::AdamWOptions(1e-2)), group,
                             ShardOptions().gradient_divide_factor(6));
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        for (int pass = 0; pass < n; ++pass) {
          std::vector<torch::Tensor> gradients;
          for (size_t i = 0; i < params.size(); ++i)
            gradients.push_back(leaf_of(100 * step + pass * w + rank, i, params[i]));
          backward_with(params, gradients);
        }
        optimizer->step();
      }
      return std::to_string(digest(params));
    });
    ASSERT_TRUE(results.ok()) << results;
    for (const auto& result : results) EXPECT_EQ(result.report, results[0].report);
    digests.push_back(std::stoull(results[0].report));
  }
  for (const auto each : digests) EXPECT_EQ(each, digests[0]);
}

}  // namespace
}  // namespace trueshard::testing
