// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/use_order.h"

#include <gtest/gtest.h>

namespace trueshard::engine {
namespace {

void use(UseOrder& order, const std::vector<int64_t>& units) {
  for (const auto unit : units) order.used(unit);
}

TEST(UseOrder, TheFirstRoundKnowsOnlyWhatWasUsedLongestAgo) {
  UseOrder order(3);
  use(order, {0, 1, 2, 1});
  EXPECT_FALSE(order.predicts());
  EXPECT_GT(order.distance(0), order.distance(2));
  EXPECT_GT(order.distance(2), order.distance(1));
  EXPECT_EQ(order.upcoming(1), -1);
}

TEST(UseOrder, TheLastRoundPredictsTheNext) {
  UseOrder order(3);
  use(order, {0, 1, 1, 2, 1, 0});
  order.begin_round();
  ASSERT_TRUE(order.predicts());
  EXPECT_EQ(order.upcoming(1), 0);
  use(order, {0, 1});
  EXPECT_EQ(order.distance(2), 1);
  EXPECT_EQ(order.distance(1), 2);
  EXPECT_EQ(order.distance(0), 3);
  EXPECT_EQ(order.upcoming(1), 2);
  EXPECT_EQ(order.upcoming(3), 0);
  EXPECT_EQ(order.upcoming(4), -1);
  use(order, {2, 1, 0});
  EXPECT_EQ(order.distance(2), UseOrder::kNever);
  order.begin_round();
  order.begin_round();  // nothing was used: the prediction stays
  EXPECT_EQ(order.upcoming(1), 0);
}

TEST(UseOrder, AUseThatWasNotPredictedEndsThePredictionForThisRound) {
  UseOrder order(3);
  use(order, {0, 1, 0});
  order.begin_round();
  use(order, {0, 2});
  EXPECT_FALSE(order.predicts());
  EXPECT_GT(order.distance(1), order.distance(2));
  order.begin_round();
  EXPECT_TRUE(order.predicts());
  EXPECT_EQ(order.upcoming(2), 2);
}

TEST(UseOrder, SkippedUsesMoveThePredictionOn) {
  UseOrder order(4);
  use(order, {0, 1, 2, 3});
  order.begin_round();
  use(order, {0, 2});
  ASSERT_TRUE(order.predicts());
  EXPECT_EQ(order.distance(1), UseOrder::kNever);
  EXPECT_EQ(order.upcoming(1), 3);
}

// Evaluation for ever: nothing grows with it.
TEST(UseOrder, ARoundThatNeverEndsIsNotRecordedWithoutEnd) {
  UseOrder order(2);
  for (int i = 0; i < 200000; ++i) order.used(i % 2);
  order.begin_round();
  int64_t known = 0;
  while (order.upcoming(known + 1) >= 0) ++known;
  EXPECT_EQ(known, 1 << 16);
}

}  // namespace
}  // namespace trueshard::engine
