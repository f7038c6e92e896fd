// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/sum_tree_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

namespace trueshard::plan {
namespace {

using kernels::SumStep;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// The definition, word for word: numerics section 1.
template <typename Real>
std::optional<Real> tree(const std::vector<std::optional<Real>>& leaves, size_t lo, size_t hi) {
  if (lo == hi) return std::nullopt;
  if (hi - lo == 1) return leaves[lo];
  size_t half = 1;
  while (half * 2 < hi - lo) half *= 2;
  const auto left = tree(leaves, lo, lo + half);
  const auto right = tree(leaves, lo + half, hi);
  if (!left) return right;
  if (!right) return left;
  return static_cast<Real>(*left + *right);
}

template <typename Real>
bool same_bits(const std::optional<Real>& a, const std::optional<Real>& b) {
  return a.has_value() == b.has_value() && (!a || std::memcmp(&*a, &*b, sizeof(Real)) == 0);
}

// A fault is a program that the kernels could not run.
struct ProgramFault : std::logic_error {
  using std::logic_error::logic_error;
};

// Runs a program; operand i is operands[i], outputs come back in order. Also says how deep the stack was.
template <typename Real>
std::vector<Real> run(const SumProgram& program, const std::vector<Real>& operands, size_t& depth) {
  std::vector<Real> stack, outputs(program.output_slots.size());
  std::vector<int> loads(operands.size(), 0), stores(outputs.size(), 0);
  bool stored = false;
  for (const SumStep& step : program.steps) {
    if (step.kind == SumStep::Kind::kLoad) {
      if (stored) throw ProgramFault("a load after a store: outputs could not alias operands");
      stack.push_back(operands.at(step.index));
      ++loads.at(step.index);
    } else if (step.kind == SumStep::Kind::kAdd) {
      if (stack.size() < 2) throw ProgramFault("add on a short stack");
      const Real right = stack.back();
      stack.pop_back();
      stack.back() = static_cast<Real>(stack.back() + right);
    } else {
      if (stack.empty()) throw ProgramFault("store on an empty stack");
      outputs.at(step.index) = stack.back();
      ++stores.at(step.index);
      stack.pop_back();
      stored = true;
    }
    depth = std::max(depth, stack.size());
  }
  if (!stack.empty()) throw ProgramFault("values left on the stack");
  for (int n : loads)
    if (n != 1) throw ProgramFault("an operand is not loaded once");
  for (int n : stores)
    if (n != 1) throw ProgramFault("an output is not stored once");
  return outputs;
}

// The engine's side of the counter: slots hold values, a push replaces what its program says.
template <typename Real>
class Streaming {
 public:
  void push(const std::vector<std::optional<Real>>& leaves) {
    std::vector<bool> leaf_present;
    for (const auto& leaf : leaves) leaf_present.push_back(leaf.has_value());
    const SumProgram program = push_program(count_, present_, leaf_present);
    std::vector<Real> operands;
    for (const auto& source : program.operands) {
      operands.push_back(source.is_slot ? slots_.at(source.index) : *leaves.at(source.index));
    }
    const auto outputs = run(program, operands, depth_);
    for (const auto& source : program.operands)
      if (source.is_slot) slots_.erase(source.index);
    for (size_t i = 0; i < outputs.size(); ++i) {
      RC_ASSERT(slots_.emplace(program.output_slots[i], outputs[i]).second);  // never over a slot that was not merged
    }
    present_ = slots_present_after(count_, present_, leaf_present);
    count_ += leaves.size();
    check();
  }

  std::optional<Real> finish() {
    const SumProgram program = finish_program(count_, present_);
    std::vector<Real> operands;
    for (const auto& source : program.operands) operands.push_back(slots_.at(source.index));
    const auto outputs = run(program, operands, depth_);
    RC_ASSERT(outputs.size() <= 1u && (outputs.empty() || program.output_slots == std::vector<int>{0}));
    return outputs.empty() ? std::nullopt : std::optional<Real>(outputs[0]);
  }

  size_t depth() const { return depth_; }
  uint64_t count() const { return count_; }

 private:
  void check() const {
    size_t present = 0;
    for (size_t slot = 0; slot < present_.size(); ++slot) {
      RC_ASSERT(present_[slot] == (slots_.count(static_cast<int>(slot)) == 1));
      RC_ASSERT(!present_[slot] || ((count_ >> slot) & 1u) == 1u);
      present += present_[slot] ? 1 : 0;
    }
    RC_ASSERT(present == slots_.size());
    RC_ASSERT(slots_.size() <= slots_of(count_).size());
    RC_ASSERT(count_ == 0 || slots_.size() <= static_cast<size_t>(std::bit_width(count_)));
  }

  uint64_t count_ = 0;
  std::vector<bool> present_;
  std::map<int, Real> slots_;
  size_t depth_ = 0;
};

// Values over 40 binades with signs, so that every add rounds, and some -0.0.
template <typename Real>
std::vector<std::optional<Real>> random_leaves(size_t count, double present, std::mt19937& random) {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  std::vector<std::optional<Real>> leaves(count);
  for (auto& leaf : leaves) {
    const double value = std::ldexp(unit(random) - 0.5, static_cast<int>(unit(random) * 40));
    const bool is_zero = unit(random) < 0.1;
    if (unit(random) < present) leaf = is_zero ? Real(-0.0) : static_cast<Real>(value);
  }
  return leaves;
}

template <typename Real>
void check_any_split_into_passes() {
  std::mt19937 random(*rc::gen::resize(1000, rc::gen::arbitrary<uint32_t>()));
  const auto count = *rc::gen::resize(100, rc::gen::inRange<size_t>(0, 140));
  const double present = *rc::gen::element(0.0, 0.3, 0.9, 1.0);
  const auto leaves = random_leaves<Real>(count, present, random);
  Streaming<Real> streaming;
  for (size_t at = 0; at < count;) {
    const size_t pass = *rc::gen::oneOf(rc::gen::just<size_t>(0), rc::gen::inRange<size_t>(1, 9),
                                        rc::gen::resize(100, rc::gen::inRange<size_t>(1, 140)));
    const size_t end = std::min(count, at + pass);
    streaming.push({leaves.begin() + static_cast<int64_t>(at), leaves.begin() + static_cast<int64_t>(end)});
    at = end;
  }
  const auto expected = tree(leaves, 0, count);
  RC_ASSERT(same_bits(streaming.finish(), expected));
  RC_ASSERT(streaming.depth() <= static_cast<size_t>(std::bit_width(count)) + 1);

  std::vector<bool> leaf_present;
  std::vector<Real> operands;
  for (const auto& leaf : leaves) leaf_present.push_back(leaf.has_value());
  const SumProgram whole = whole_program(leaf_present);
  for (const auto& source : whole.operands) {
    RC_ASSERT(!source.is_slot);
    operands.push_back(*leaves.at(source.index));
  }
  size_t depth = 0;
  const auto outputs = run(whole, operands, depth);
  RC_ASSERT(same_bits(outputs.empty() ? std::nullopt : std::optional<Real>(outputs.at(0)), expected));
}

RC_GTEST_PROP(SumTreePlan, AnySplitIntoPassesGivesTheTreesFloatBits, ()) { check_any_split_into_passes<float>(); }
RC_GTEST_PROP(SumTreePlan, AnySplitIntoPassesGivesTheTreesDoubleBits, ()) { check_any_split_into_passes<double>(); }

TEST(SumTreePlan, EveryFactorisationOfLeavesIntoRanksAndPassesAgrees) {
  std::mt19937 random(7);
  for (size_t count = 1; count <= 48; ++count) {
    const auto leaves = random_leaves<float>(count, 0.9, random);
    const auto expected = tree(leaves, 0, count);
    for (size_t ranks = 1; ranks <= count; ++ranks) {
      if (count % ranks != 0) continue;
      Streaming<float> streaming;
      for (size_t at = 0; at < count; at += ranks) {
        streaming.push({leaves.begin() + static_cast<int64_t>(at), leaves.begin() + static_cast<int64_t>(at + ranks)});
      }
      EXPECT_TRUE(same_bits(streaming.finish(), expected)) << count << " leaves, " << ranks << " ranks";
    }
  }
}

TEST(SumTreePlan, SmallSubtreesMeetBeforeTheBigOne) {
  // 1 + (2^-24 + 2^-24) keeps the small ones; (1 + 2^-24) + 2^-24 loses both.
  const float tiny = std::ldexp(1.0f, -24);
  const std::vector<std::optional<float>> leaves{1.0f, 0.0f, 0.0f, 0.0f, tiny, 0.0f, tiny};
  for (size_t pass : {1, 3, 7}) {
    Streaming<float> streaming;
    for (size_t at = 0; at < 7; at += pass) {
      streaming.push({leaves.begin() + static_cast<int64_t>(at),
                      leaves.begin() + static_cast<int64_t>(std::min<size_t>(7, at + pass))});
    }
    EXPECT_EQ(streaming.finish(), 1.0f + std::ldexp(1.0f, -23)) << "passes of " << pass;
  }
}

TEST(SumTreePlan, AbsentLeavesKeepMinusZeroAndAllAbsentIsAbsent) {
  Streaming<float> streaming;
  streaming.push({std::nullopt, -0.0f, std::nullopt});
  streaming.push({std::nullopt, std::nullopt, std::nullopt});
  const auto sum = streaming.finish();
  ASSERT_TRUE(sum.has_value());
  EXPECT_TRUE(std::signbit(*sum));

  Streaming<float> nothing;
  nothing.push({std::nullopt, std::nullopt, std::nullopt});
  EXPECT_FALSE(nothing.finish().has_value());
  EXPECT_TRUE(finish_program(3, {}).steps.empty());
  EXPECT_TRUE(finish_program(0, {}).steps.empty());
  EXPECT_TRUE(whole_program({}).steps.empty());
}

TEST(SumTreePlan, SlotsThatStayAreNotTouched) {
  // 13 = 1101b. One more leaf merges slot 0 into a new slot 1; slots 2 and 3 stay.
  const SumProgram program = push_program(13, {true, false, true, true}, {true});
  ASSERT_EQ(program.operands.size(), 2u);
  EXPECT_TRUE(program.operands[0].is_slot);
  EXPECT_EQ(program.operands[0].index, 0);
  EXPECT_FALSE(program.operands[1].is_slot);
  EXPECT_EQ(program.output_slots, std::vector<int>{1});
  EXPECT_EQ(slots_present_after(13, {true, false, true, true}, {true}), (std::vector<bool>{false, true, true, true}));
  // Nothing pushed, nothing done.
  EXPECT_TRUE(push_program(13, {true, false, true, true}, {}).steps.empty());
  EXPECT_EQ(slots_present_after(13, {true, false, true, true}, {}), (std::vector<bool>{true, false, true, true}));
  // Slots stay present only if they were.
  EXPECT_EQ(slots_present_after(12, {}, {false, true}), (std::vector<bool>{false, true, false, false}));
}

TEST(SumTreePlan, SlotsAreTheBitsOfTheCount) {
  EXPECT_TRUE(slots_of(0).empty());
  EXPECT_EQ(slots_of(13), (std::vector<int>{3, 2, 0}));
  EXPECT_EQ(slots_of((uint64_t{1} << 62) + 1), (std::vector<int>{62, 0}));
}

TEST(SumTreePlan, TheDeepestProgramFitsTheStack) {
  const uint64_t before = (uint64_t{1} << 62) - 1;  // all 62 slots merge at one more leaf
  const std::vector<bool> all(62, true);
  const SumProgram push = push_program(before, all, {true});
  size_t depth = 0;
  EXPECT_EQ(run(push, std::vector<double>(63, 1.0), depth), std::vector<double>{63.0});
  EXPECT_EQ(push.output_slots, std::vector<int>{62});
  EXPECT_EQ(depth, 63u);
  EXPECT_LE(depth, static_cast<size_t>(kernels::kMaxSumStack));
  const SumProgram finish = finish_program((uint64_t{1} << 63) - 1, std::vector<bool>(63, true));
  EXPECT_EQ(run(finish, std::vector<double>(63, 1.0), depth), std::vector<double>{63.0});
  EXPECT_LE(depth, static_cast<size_t>(kernels::kMaxSumStack));
}

TEST(SumTreePlan, BadInputIsRefused) {
  const auto refused = [](auto call, const char* text) {
    EXPECT_THAT(call, ThrowsMessage<std::invalid_argument>(HasSubstr(text)));
  };
  const uint64_t most = (uint64_t{1} << 63) - 1;
  refused([&] { push_program(most, {}, {true}); },
          "push of 1 leaves after 9223372036854775807, expected less than 2^63");
  refused([&] { push_program(UINT64_MAX, {}, {true, true}); }, "expected less than 2^63");
  refused([&] { finish_program(most + 1, {}); }, "expected less than 2^63");
  refused([&] { push_program(4, {true}, {true}); }, "slot 0 is said to be present after 4 leaves");
  refused([&] { finish_program(0, {true}); }, "slot 0 is said to be present after 0 leaves");
  refused([&] { finish_program(1, std::vector<bool>(80, true)); }, "slot 1 is said to be present after 1 leaves");
  refused([&] { whole_program(std::vector<bool>(256, true)); },
          "more than 255 present leaves and slots in one program");
  EXPECT_NO_THROW(whole_program(std::vector<bool>(255, true)));
  EXPECT_NO_THROW(whole_program(std::vector<bool>(10000, false)));  // absent leaves are no operands
}

}  // namespace
}  // namespace trueshard::plan
