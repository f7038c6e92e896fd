// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/shard_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/plan/plan_generators.h"

namespace trueshard::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Who owns each element of each padded bucket: parameter * 2^32 + element, or -1 for padding.
std::vector<std::vector<int64_t>> owners(const ShardPlan& plan) {
  std::vector<std::vector<int64_t>> cells;
  for (const BucketPlan& bucket : plan.buckets) cells.emplace_back(bucket.padded, -1);
  for (size_t p = 0; p < plan.parameters.size(); ++p) {
    auto& bucket_cells = cells[plan.bucket_of[p]];
    for (int rank = 0; rank < plan.world; ++rank) {
      const Piece piece = plan.piece(static_cast<int64_t>(p), rank);
      const int64_t start = plan.buckets[plan.bucket_of[p]].shard_range(rank).begin + piece.shard_offset;
      for (int64_t i = 0; i < piece.in_parameter.size(); ++i) {
        int64_t& cell = bucket_cells.at(start + i);
        RC_ASSERT(cell == -1);
        cell = (static_cast<int64_t>(p) << 32) + piece.in_parameter.begin + i;
      }
    }
  }
  return cells;
}

RC_GTEST_PROP(ShardPlan, EveryElementHasOneOwnerAndPaddingHasNone, ()) {
  const auto parameters = random_parameters(0);
  const int world = *rc::gen::resize(100, rc::gen::inRange(1, 10));
  const ShardPlan plan = make_shard_plan(parameters, world, random_bucket_bytes(parameters));
  const auto cells = owners(plan);
  std::multiset<int64_t> seen;
  int64_t elements = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const Placement& placement = plan.buckets[plan.bucket_of[p]].placements[plan.placement_of[p]];
    RC_ASSERT(placement.parameter == static_cast<int64_t>(p));
    RC_ASSERT(placement.numel == parameters[p].numel);
    // The owner's element lies where the placement says, so that ranks and the whole bucket agree about addresses.
    for (int64_t i = 0; i < placement.numel; ++i) {
      RC_ASSERT(cells[plan.bucket_of[p]].at(placement.offset + i) == (static_cast<int64_t>(p) << 32) + i);
    }
    elements += placement.numel;
  }
  int64_t owned = 0;
  for (const auto& bucket : cells)
    owned += std::count_if(bucket.begin(), bucket.end(), [](int64_t c) { return c >= 0; });
  RC_ASSERT(owned == elements);
}

RC_GTEST_PROP(ShardPlan, StartsAreAlignedAndPaddingIsLeast, ()) {
  const auto parameters = random_parameters(0);
  const int world = *rc::gen::resize(100, rc::gen::inRange(1, 10));
  const ShardPlan plan = make_shard_plan(parameters, world, random_bucket_bytes(parameters));
  int64_t padded = 0;
  for (const BucketPlan& bucket : plan.buckets) {
    int64_t end = 0;
    for (const Placement& placement : bucket.placements) {
      RC_ASSERT(placement.offset % kParameterAlignment == 0);
      RC_ASSERT(placement.offset >= end);
      RC_ASSERT(placement.offset - end < kParameterAlignment);
      end = placement.offset + placement.numel;
    }
    RC_ASSERT(bucket.padded % (world * kShardAlignment) == 0);
    RC_ASSERT(bucket.padded >= end);
    RC_ASSERT(bucket.padded - end < world * kShardAlignment);
    RC_ASSERT(bucket.shard * world == bucket.padded);
    padded += bucket.padded;
  }
  RC_ASSERT(plan.padded_elements() == padded);
  RC_ASSERT(plan.shard_elements() * world == padded);
  for (size_t p = 0; p < parameters.size(); ++p) {
    for (int rank = 0; rank < world; ++rank) {
      const Piece piece = plan.piece(static_cast<int64_t>(p), rank);
      RC_ASSERT(piece.in_parameter.empty() || piece.in_parameter.begin % kShardAlignment == 0);
      RC_ASSERT(piece.in_parameter.begin >= 0 && piece.in_parameter.end <= parameters[p].numel);
      RC_ASSERT(piece.shard_offset >= 0);
      RC_ASSERT(piece.shard_offset + piece.in_parameter.size() <= plan.buckets[plan.bucket_of[p]].shard);
    }
  }
}

RC_GTEST_PROP(ShardPlan, BucketsFillInReverseOrderUpToTheirBytes, ()) {
  const auto parameters = random_parameters(1);
  const int64_t bucket_bytes = random_bucket_bytes(parameters);
  const ShardPlan plan = make_shard_plan(parameters, 3, bucket_bytes);
  auto next = static_cast<int64_t>(parameters.size()) - 1;
  int64_t previous_bytes = 0, previous_master = 0;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketPlan& bucket = plan.buckets[b];
    RC_ASSERT(!bucket.placements.empty());
    const ParameterSpec& first = parameters[bucket.placements[0].parameter];
    if (b > 0) {  // it did not fit into the bucket before
      RC_ASSERT(first.master_itemsize != previous_master ||
                previous_bytes + first.numel * first.compute_itemsize > bucket_bytes);
    }
    int64_t bytes = 0;
    for (const Placement& placement : bucket.placements) {
      RC_ASSERT(placement.parameter == next--);
      RC_ASSERT(parameters[placement.parameter].master_itemsize == bucket.master_itemsize);
      bytes += placement.numel * parameters[placement.parameter].compute_itemsize;
    }
    RC_ASSERT(bytes <= bucket_bytes || bucket.placements.size() == 1u);
    previous_bytes = bytes;
    previous_master = bucket.master_itemsize;
  }
  RC_ASSERT(next == -1);
}

// Nothing is allocated here: only the arithmetic is under test.
TEST(ShardPlan, SizesAbove32BitsAddUpOverThreeAndFourRanks) {
  const std::vector<int64_t> sizes{(int64_t{1} << 31) + 7, (int64_t{1} << 32) + 1};
  for (int world : {3, 4}) {
    for (int64_t itemsize : {1, 2, 4, 8}) {
      for (int64_t bucket_bytes : {int64_t{1}, int64_t{1} << 60}) {
        SCOPED_TRACE(testing::Message() << world << " ranks, " << itemsize << " bytes, bucket " << bucket_bytes);
        const ShardPlan plan =
            make_shard_plan({{"a", sizes[0], itemsize, 4}, {"b", sizes[1], itemsize, 4}}, world, bucket_bytes);
        ASSERT_EQ(plan.buckets.size(), bucket_bytes == 1 ? 2u : 1u);
        for (int64_t p : {0, 1}) {
          const BucketPlan& bucket = plan.buckets[plan.bucket_of[p]];
          int64_t at = 0;
          for (int rank = 0; rank < world; ++rank) {
            const Piece piece = plan.piece(p, rank);
            EXPECT_EQ(piece.in_parameter.begin, at) << "gap or overlap before rank " << rank;
            at = piece.in_parameter.end;
            if (piece.in_parameter.empty()) continue;
            // The byte where a rank finds its piece is the byte where the placement has that element.
            const int64_t from_shard = (bucket.shard_range(rank).begin + piece.shard_offset) * itemsize;
            const int64_t offset = bucket.placements[plan.placement_of[p]].offset;
            EXPECT_EQ(from_shard, offset * itemsize + piece.in_parameter.begin * itemsize);
            EXPECT_LE((bucket.shard_range(rank).begin + piece.shard_offset + piece.in_parameter.size()) * itemsize,
                      bucket.padded * itemsize);
          }
          EXPECT_EQ(at, sizes[p]);
        }
        EXPECT_GE(plan.padded_elements(), sizes[0] + sizes[1]);
        EXPECT_LT(plan.padded_elements(), sizes[0] + sizes[1] + 64 + 2 * world * kShardAlignment);
      }
    }
  }
}

TEST(ShardPlan, TwoBigParametersLieWhereCountingByHandPutsThem) {
  // Reverse order: b at 0, a at 2^32 + 64 (the multiple of 64 after 2^32 + 1). P is a multiple of 4 * 16.
  const ShardPlan plan = make_shard_plan({{"a", 2147483655, 2, 4}, {"b", 4294967297, 2, 4}}, 4, int64_t{1} << 60);
  EXPECT_EQ(plan.buckets[0].placements[0].parameter, 1);
  EXPECT_EQ(plan.buckets[0].placements[0].offset, 0);
  EXPECT_EQ(plan.buckets[0].placements[1].offset, 4294967360);
  EXPECT_EQ(plan.buckets[0].padded, 6442451072);
  EXPECT_EQ(plan.buckets[0].shard, 1610612768);
  EXPECT_EQ(plan.piece(1, 2).in_parameter, (Range{3221225536, 4294967297}));
  EXPECT_EQ(plan.piece(0, 2).in_parameter, (Range{0, 536870944}));
  EXPECT_EQ(plan.piece(0, 2).shard_offset, 1073741824);
  EXPECT_EQ(plan.piece(0, 3).in_parameter, (Range{536870944, 2147483655}));
}

TEST(ShardPlan, EmptyParametersHaveAPlacementAndEmptyPieces) {
  const ShardPlan plan = make_shard_plan({{"e0", 0, 4, 4}, {"w", 100, 4, 4}, {"e1", 0, 4, 4}}, 3, 1 << 20);
  ASSERT_EQ(plan.buckets.size(), 1u);
  ASSERT_EQ(plan.buckets[0].placements.size(), 3u);
  EXPECT_EQ(plan.buckets[0].padded, 144);
  for (int64_t p : {0, 2}) {
    for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(plan.piece(p, rank).in_parameter.empty());
    EXPECT_LE(plan.buckets[0].placements[plan.placement_of[p]].offset, plan.buckets[0].padded);
  }
  const ShardPlan only_empty = make_shard_plan({{"e", 0, 4, 4}}, 3, 1);
  ASSERT_EQ(only_empty.buckets.size(), 1u);
  EXPECT_EQ(only_empty.padded_elements(), 0);
  EXPECT_TRUE(make_shard_plan({}, 3, 1).buckets.empty());
}

TEST(ShardPlan, AnOversizedParameterStandsAlone) {
  const ShardPlan plan = make_shard_plan({{"a", 8, 4, 4}, {"big", 1000, 4, 4}, {"z", 8, 4, 4}, {"e", 0, 4, 4}}, 3, 256);
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_EQ(plan.bucket_of, (std::vector<int64_t>{2, 1, 0, 0}));
}

TEST(ShardPlan, ABucketIsFullAtItsBytesAndNotOneLater) {
  const std::vector<ParameterSpec> parameters{{"a", 30, 2, 4}, {"b", 20, 4, 4}};  // 60 + 80 bytes of compute dtype
  EXPECT_EQ(make_shard_plan(parameters, 3, 140).buckets.size(), 1u);
  EXPECT_EQ(make_shard_plan(parameters, 3, 139).buckets.size(), 2u);
}

TEST(ShardPlan, BadInputIsRefusedByName) {
  const std::vector<ParameterSpec> good{{"enc.0.weight", 10, 2, 4}};
  const auto refused = [](auto call, const auto& text) {
    EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(text));
  };
  refused([&] { make_shard_plan(good, 0, 1); }, AllOf(HasSubstr("world is 0"), HasSubstr("expected 1 or more")));
  refused([&] { make_shard_plan(good, -3, 1); }, HasSubstr("world is -3"));
  refused([&] { make_shard_plan(good, 3, 0); }, HasSubstr("bucket_bytes is 0, expected 1 or more"));
  refused(
      [&] {
        make_shard_plan({{"enc.0.weight", -1, 2, 4}}, 3, 1);
      },
      HasSubstr("parameter 'enc.0.weight' has -1 elements, expected 0 or more"));
  refused(
      [&] {
        make_shard_plan({{"w", 1, 3, 4}}, 3, 1);
      },
      HasSubstr("parameter 'w' has a compute itemsize of 3 bytes, expected 1, 2, 4 or 8"));
  refused(
      [&] {
        make_shard_plan({{"w", 1, 4, 0}}, 3, 1);
      },
      HasSubstr("parameter 'w' has a master itemsize of 0 bytes, expected 1, 2, 4 or 8"));
  const ShardPlan plan = make_shard_plan(good, 3, 1);
  refused([&] { plan.piece(1, 0); }, HasSubstr("piece of parameter 1, expected 0 to 1 (exclusive)"));
  refused([&] { plan.piece(-1, 0); }, HasSubstr("piece of parameter -1"));
  refused([&] { plan.piece(0, 3); }, HasSubstr("piece for rank 3, expected 0 to 3 (exclusive)"));
}

TEST(ShardPlan, TotalsThatDoNotFitAreRefusedBeforeTheyOverflow) {
  const auto text = ThrowsMessage<std::invalid_argument>(HasSubstr("more than 62 bits of bytes"));
  constexpr int64_t kLargest = INT64_MAX;
  EXPECT_THAT([] { make_shard_plan({{"w", kLargest, 1, 4}}, 3, 1); }, text);
  EXPECT_THAT([] { make_shard_plan({{"w", kLargest, 1, 1}}, 3, kLargest); }, text);
  EXPECT_THAT(
      [] {
        make_shard_plan({{"a", int64_t{1} << 59, 4, 4}, {"b", int64_t{1} << 59, 4, 4}}, 3, kLargest);
      },
      text);
  // The parameter fits, its padding does not.
  EXPECT_THAT([] { make_shard_plan({{"w", (int64_t{1} << 60) - 1, 4, 4}}, 1 << 20, kLargest); }, text);
  EXPECT_NO_THROW(make_shard_plan({{"a", int64_t{1} << 59, 4, 4}, {"b", int64_t{1} << 58, 4, 4}}, 3, kLargest));
}

TEST(ShardPlanDigest, ChangesWithEveryField) {
  const ShardPlan base = make_shard_plan({{"ab", 100, 2, 4}, {"c", 70, 2, 4}}, 3, 1 << 20);
  const std::vector<std::function<void(ShardPlan&)>> changes{
      [](ShardPlan& p) { p.world = 4; },
      [](ShardPlan& p) { p.parameters[0].name = "aB"; },
      [](ShardPlan& p) { p.parameters[0].name = "a", p.parameters[1].name = "bc"; },
      [](ShardPlan& p) { p.parameters[1].numel = 71; },
      [](ShardPlan& p) { p.parameters[1].numel += int64_t{1} << 40; },
      [](ShardPlan& p) { p.parameters[0].compute_itemsize = 4; },
      [](ShardPlan& p) { p.parameters[0].master_itemsize = 8; },
      [](ShardPlan& p) { std::swap(p.parameters[0], p.parameters[1]); },
      [](ShardPlan& p) { p.parameters.pop_back(); },
      [](ShardPlan& p) { p.buckets[0].placements[0].parameter = 0; },
      [](ShardPlan& p) { p.buckets[0].placements[1].offset += 64; },
      [](ShardPlan& p) { p.buckets[0].placements[1].numel += 1; },
      [](ShardPlan& p) { p.buckets[0].placements.pop_back(); },
      [](ShardPlan& p) { p.buckets[0].master_itemsize = 8; },
      [](ShardPlan& p) { p.buckets[0].padded += 48; },
      [](ShardPlan& p) { p.buckets[0].shard += 16; },
      [](ShardPlan& p) { p.buckets.emplace_back(); },
      [](ShardPlan& p) { p.bucket_of[1] = 1; },
      [](ShardPlan& p) { p.placement_of[1] = 1; },
  };
  std::set<uint64_t> digests{digest(base)};
  for (const auto& change : changes) {
    ShardPlan changed = base;
    change(changed);
    digests.insert(digest(changed));
  }
  EXPECT_EQ(digests.size(), changes.size() + 1);
  EXPECT_EQ(digest(make_shard_plan({{"ab", 100, 2, 4}, {"c", 70, 2, 4}}, 3, 1 << 20)), digest(base));
}

TEST(ShardPlanDigest, IsFnv1a) {  // published test vectors
  EXPECT_EQ(digest("", 0), 0xcbf29ce484222325ull);
  EXPECT_EQ(digest("a", 1), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(digest("foobar", 6), 0x85944171f73967e8ull);
  EXPECT_EQ(digest("bar", 3, digest("foo", 3)), digest("foobar", 6));
}

}  // namespace
}  // namespace trueshard::plan
