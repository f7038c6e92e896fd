// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/norm_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.h"
#include "tests/plan/plan_generators.h"

namespace trueshard::plan {
namespace {

using kernels::kBlock;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double sum(double a, double b) { return a + b; }
double maximum(double a, double b) { return std::isnan(a) || std::isnan(b) ? kNan : std::max(a, b); }

int64_t combined = 0;
double counted_sum(double a, double b) {
  ++combined;
  return a + b;
}

// T of the definition over plain values.
double tree(const std::vector<double>& values, size_t lo, size_t hi, NormPlan::Combine combine) {
  if (lo == hi) return 0.0;
  if (hi - lo == 1) return values[lo];
  size_t half = 1;
  while (half * 2 < hi - lo) half *= 2;
  return combine(tree(values, lo, lo + half, combine), tree(values, lo + half, hi, combine));
}

// 16 rows of 16 lanes: rows lane by lane in the tree, then the lanes; missing elements count as +0.
double block_value(const double* elements, int64_t count, bool is_sum) {
  std::array<double, kBlock> value{};
  for (int64_t i = 0; i < count; ++i) value[i] = is_sum ? elements[i] * elements[i] : std::fabs(elements[i]);
  const NormPlan::Combine combine = is_sum ? sum : maximum;
  std::vector<double> lanes;
  for (size_t lane = 0; lane < 16; ++lane) {
    std::vector<double> rows;
    for (size_t row = 0; row < 16; ++row) rows.push_back(value[row * 16 + lane]);
    lanes.push_back(tree(rows, 0, 16, combine));
  }
  return tree(lanes, 0, 16, combine);
}

std::vector<double> block_values(const std::vector<double>& elements, Range range, bool is_sum) {
  std::vector<double> values;
  for (int64_t at = range.begin; at < range.end; at += kBlock) {
    values.push_back(block_value(elements.data() + at, std::min(kBlock, range.end - at), is_sum));
  }
  return values;
}

struct Gradients {
  std::vector<std::vector<double>> elements;  // what fp32 gradients are after widening
  std::vector<bool> present;
};

// What all ranks send. Absent gradients are sent as NaN, which must never be read.
std::vector<std::vector<double>> messages_of(const NormPlan& norm, int world, const Gradients& gradients, bool is_sum) {
  std::vector<std::vector<double>> messages;
  for (int rank = 0; rank < world; ++rank) {
    std::vector<double> message(norm.message_doubles(rank), kNan);
    for (const BlockRun& run : norm.runs(rank)) {
      if (!gradients.present[run.parameter]) continue;
      const auto values = block_values(gradients.elements[run.parameter], run.elements, is_sum);
      RC_ASSERT(static_cast<int64_t>(values.size()) == run.blocks.size());
      norm.write_roots(run, values.data(), is_sum ? sum : maximum, message.data());
    }
    for (const CutPiece& cut : norm.cuts(rank)) {
      if (!gradients.present[cut.parameter]) continue;
      const double* from = gradients.elements[cut.parameter].data();
      std::copy(from + cut.elements.begin, from + cut.elements.end, message.begin() + cut.message_offset);
    }
    messages.push_back(std::move(message));
  }
  return messages;
}

std::vector<double> values_through_plan(const ShardPlan& plan, const Gradients& gradients, bool is_sum) {
  const NormPlan norm(plan);
  const auto messages = messages_of(norm, plan.world, gradients, is_sum);
  std::vector<const double*> pointers;
  for (const auto& message : messages) pointers.push_back(message.data());
  return norm.parameter_values(
      pointers, gradients.present, is_sum ? sum : maximum,
      [&](const double* elements, int64_t count) { return block_value(elements, count, is_sum); });
}

Gradients random_gradients(const std::vector<ParameterSpec>& parameters, std::mt19937& random, double nan_share) {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  Gradients gradients;
  for (const ParameterSpec& spec : parameters) {
    std::vector<double> elements;
    for (int64_t i = 0; i < spec.numel; ++i) {
      const auto value = static_cast<float>(std::ldexp(unit(random) - 0.5, static_cast<int>(unit(random) * 30)));
      elements.push_back(unit(random) < nan_share ? kNan : static_cast<double>(value));
    }
    gradients.elements.push_back(std::move(elements));
    gradients.present.push_back(unit(random) < 0.85);
  }
  return gradients;
}

bool same_bits(double a, double b) { return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0; }

void check_against_definition(bool is_sum, double nan_share) {
  const auto parameters = random_parameters(1);
  std::mt19937 random(*rc::gen::resize(1000, rc::gen::arbitrary<uint32_t>()));
  const Gradients gradients = random_gradients(parameters, random, nan_share);
  std::vector<double> expected;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto blocks = block_values(gradients.elements[p], {0, parameters[p].numel}, is_sum);
    expected.push_back(gradients.present[p] ? tree(blocks, 0, blocks.size(), is_sum ? sum : maximum) : 0.0);
  }
  for (int world : {1, 2, 3, 4, 5, 8}) {
    const ShardPlan plan = make_shard_plan(parameters, world, random_bucket_bytes(parameters));
    const auto values = values_through_plan(plan, gradients, is_sum);
    RC_ASSERT(values.size() == expected.size());
    for (size_t p = 0; p < expected.size(); ++p) RC_ASSERT(same_bits(values[p], expected[p]));
  }
}

RC_GTEST_PROP(NormPlan, EveryWorldAndBucketSizeGivesTheTreesBits, ()) { check_against_definition(true, 0.0); }
RC_GTEST_PROP(NormPlan, MaximumCarriesNanFromAnyRank, ()) {
  check_against_definition(false, *rc::gen::element(0.0, 0.0001, 0.01));
}

TEST(NormPlan, ManyBlocksOverManyRanksGiveTheTreesBits) {
  std::mt19937 random(5);
  for (int64_t numel : {int64_t{256} * 127, int64_t{256} * 128, int64_t{256} * 129 + 1, int64_t{256} * 300 - 16}) {
    const std::vector<ParameterSpec> parameters{{"a", numel, 4, 4}, {"b", 70, 4, 4}};
    Gradients gradients = random_gradients(parameters, random, 0.0);
    gradients.present = {true, true};
    const auto blocks = block_values(gradients.elements[0], {0, numel}, true);
    const double expected = tree(blocks, 0, blocks.size(), sum);
    for (int world = 1; world <= 40; ++world) {
      const ShardPlan plan = make_shard_plan(parameters, world, 1 << 30);
      EXPECT_TRUE(same_bits(values_through_plan(plan, gradients, true)[0], expected)) << numel << " over " << world;
    }
  }
}

TEST(NormPlan, ABlockMayBeCutIntoSixteenPieces) {
  std::mt19937 random(6);
  const std::vector<ParameterSpec> parameters{{"a", 250, 4, 4}};
  Gradients gradients = random_gradients(parameters, random, 0.0);
  gradients.present = {true};
  const ShardPlan plan = make_shard_plan(parameters, 16, 1);
  const NormPlan norm(plan);
  for (int rank = 0; rank < 16; ++rank) {
    EXPECT_TRUE(norm.runs(rank).empty());
    EXPECT_EQ(norm.cuts(rank).size(), 1u);
    EXPECT_EQ(norm.message_doubles(rank), rank == 15 ? 10 : 16);
  }
  EXPECT_TRUE(
      same_bits(values_through_plan(plan, gradients, true)[0], block_value(gradients.elements[0].data(), 250, true)));
}

RC_GTEST_PROP(NormPlan, RunsAndCutsCoverEveryElementOnceAndTheMessageHasNoGap, ()) {
  const auto parameters = random_parameters(1);
  const int world = *rc::gen::resize(100, rc::gen::inRange(1, 10));
  const ShardPlan plan = make_shard_plan(parameters, world, random_bucket_bytes(parameters));
  const NormPlan norm(plan);
  std::vector<std::vector<int>> seen;
  for (const ParameterSpec& spec : parameters) seen.emplace_back(spec.numel, 0);
  for (int rank = 0; rank < world; ++rank) {
    std::vector<int> message(norm.message_doubles(rank), 0);
    const auto mark = [&](int64_t parameter, Range elements, Range doubles) {
      const Range owned = plan.piece(parameter, rank).in_parameter;
      RC_ASSERT(!elements.empty() && owned.begin <= elements.begin && elements.end <= owned.end);
      for (int64_t i = elements.begin; i < elements.end; ++i) ++seen[parameter].at(i);
      for (int64_t i = doubles.begin; i < doubles.end; ++i) ++message.at(i);
    };
    for (const BlockRun& run : norm.runs(rank)) {
      RC_ASSERT(run.elements.begin == run.blocks.begin * kBlock);
      RC_ASSERT(run.elements.end == std::min(run.blocks.end * kBlock, parameters[run.parameter].numel));
      RC_ASSERT(run.root_count <= run.blocks.size());
      mark(run.parameter, run.elements, {run.message_offset, run.message_offset + run.root_count});
    }
    for (const CutPiece& cut : norm.cuts(rank)) {
      RC_ASSERT(cut.elements.begin / kBlock == cut.block && (cut.elements.end - 1) / kBlock == cut.block);
      RC_ASSERT(cut.elements.size() < kBlock);
      mark(cut.parameter, cut.elements, {cut.message_offset, cut.message_offset + cut.elements.size()});
    }
    for (int n : message) RC_ASSERT(n == 1);
  }
  for (const auto& parameter : seen)
    for (int n : parameter) RC_ASSERT(n == 1);
}

// Nothing of that size is allocated: 2^24 blocks a parameter shrink to a few roots a rank.
TEST(NormPlan, BigParametersCostALogarithmOfMessageAndWork) {
  const std::vector<int64_t> sizes{(int64_t{1} << 31) + 7, (int64_t{1} << 32) + 1};
  for (int world : {3, 4}) {
    const ShardPlan plan = make_shard_plan({{"a", sizes[0], 2, 4}, {"b", sizes[1], 2, 4}}, world, int64_t{1} << 60);
    const NormPlan norm(plan);
    std::vector<std::vector<double>> messages;
    std::vector<int64_t> covered(2, 0);
    for (int rank = 0; rank < world; ++rank) {
      ASSERT_LE(norm.message_doubles(rank), 2 * 2 * 32 + 4 * kBlock);
      messages.emplace_back(norm.message_doubles(rank), 1.0);
      for (const BlockRun& run : norm.runs(rank)) covered[run.parameter] += run.elements.size();
      for (const CutPiece& cut : norm.cuts(rank)) covered[cut.parameter] += cut.elements.size();
    }
    EXPECT_EQ(covered, sizes);
    std::vector<const double*> pointers;
    for (const auto& message : messages) pointers.push_back(message.data());
    combined = 0;
    int64_t cut_blocks = 0;
    norm.parameter_values(pointers, {true, true}, counted_sum, [&](const double*, int64_t count) {
      ++cut_blocks;
      return static_cast<double>(count);
    });
    EXPECT_GT(combined, 0);
    EXPECT_LE(combined, world * 2 * 2 * 32);
    EXPECT_LE(cut_blocks, 2 * world);
  }
}

TEST(NormPlan, AbsentParametersKeepTheirPlaceInTheTree) {
  // T(0,4) = (v0 + v1) + (v2 + v3): with v1 absent, v0 still meets v2 + v3 as a whole.
  const double tiny = std::ldexp(1.0, -53);
  const std::vector<double> values{1.0, 99.0, tiny, tiny};
  EXPECT_EQ(combine_values(values, {true, false, true, true}, sum), 1.0 + std::ldexp(1.0, -52));
  EXPECT_EQ(combine_values(values, {false, true, false, false}, sum), 99.0);
  EXPECT_EQ(combine_values(values, {false, false, false, false}, sum), 0.0);
  EXPECT_EQ(combine_values({}, {}, sum), 0.0);
  EXPECT_TRUE(std::isnan(combine_values({1.0, kNan, 2.0}, {true, true, true}, maximum)));
  EXPECT_EQ(combine_values({1.0, kNan, 2.0}, {true, false, true}, maximum), 2.0);
}

TEST(NormPlan, EmptyParametersAndRanksWithoutAShareJoinIn) {
  const ShardPlan plan = make_shard_plan({{"e", 0, 4, 4}, {"w", 16, 4, 4}}, 3, 1 << 20);
  const Gradients gradients{{{}, std::vector<double>(16, 2.0)}, {true, true}};
  EXPECT_EQ(NormPlan(plan).message_doubles(0), 1);
  EXPECT_EQ(NormPlan(plan).message_doubles(2), 0);
  EXPECT_EQ(values_through_plan(plan, gradients, true), (std::vector<double>{0.0, 64.0}));
}

TEST(NormPlan, BadInputIsRefused) {
  const NormPlan norm(make_shard_plan({{"a", 16, 4, 4}}, 3, 1));
  const auto value = [](const double*, int64_t) { return 0.0; };
  const auto refused = [](auto call, const char* text) {
    EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(HasSubstr(text)));
  };
  refused([&] { norm.runs(3); }, "layout of rank 3, expected 0 to 3 (exclusive)");
  refused([&] { norm.cuts(-1); }, "layout of rank -1");
  refused([&] { norm.message_doubles(7); }, "layout of rank 7");
  refused([&] { norm.parameter_values({nullptr}, {true}, sum, value); },
          "got 1 messages and 1 presence bits, expected 3 (ranks) and 1 (parameters)");
  refused([&] { norm.parameter_values({nullptr, nullptr, nullptr}, {}, sum, value); }, "and 0 presence bits");
  refused([] { combine_values({1.0}, {}, sum); }, "got 1 values and 0 presence bits");
}

}  // namespace
}  // namespace trueshard::plan
