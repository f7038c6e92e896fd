// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/sum_programs.h"

namespace trueshard::kernels::test {
namespace {

std::vector<Array> leaves_of(DType dtype, int leaf_count, int64_t count, unsigned seed) {
  std::vector<Array> leaves;
  for (int leaf = 0; leaf < leaf_count; ++leaf) {
    leaves.push_back(awkward_array(dtype, count, Numbers::kAll, seed * 100 + static_cast<unsigned>(leaf)));
  }
  return leaves;
}

// What one table made of one case.
struct Result {
  Array output;
  Array squares;
  uint8_t nonfinite = 0;
};

Result run(SumCase sum, Isa isa, bool checks) {
  Result result{Array(sum.output_dtype, sum.count), Array(DType::kFloat64, (sum.count + kBlock - 1) / kBlock)};
  sum.outputs = {result.output.data()};
  if (checks) {
    sum.epilogue.nonfinite = &result.nonfinite;
    sum.epilogue.square_sums = result.squares.as<double>();
  }
  sum.run(isa);
  return result;
}

void expect_tables_agree(const SumCase& sum, bool checks, const std::string& what) {
  const Result expected = run(sum, Isa::kReference, checks);
  for (Isa isa : fast_isas()) {
    const std::string where = what + " " + name(isa) + " count " + std::to_string(sum.count);
    const Result got = run(sum, isa, checks);
    expect_same_numbers(got.output, expected.output, where);
    if (checks) {
      expect_same_numbers(got.squares, expected.squares, where + " square sums");
      EXPECT_EQ(got.nonfinite, expected.nonfinite) << where;
    }
  }
}

TEST(SumTree, TheReferenceFollowsTheRecursiveDefinition) {
  for (int leaf_count = 1; leaf_count <= 70; ++leaf_count) {
    const std::vector<Array> leaves =
        leaves_of(DType::kFloat32, leaf_count, 40, 7u + static_cast<unsigned>(leaf_count));
    for (int absent_every : {0, 1, 2, 3, 5}) {
      std::vector<bool> present(static_cast<size_t>(leaf_count), true);
      for (int leaf = 0; absent_every > 0 && leaf < leaf_count; leaf += absent_every)
        present[static_cast<size_t>(leaf)] = false;
      SumCase sum;
      sum.steps = tree_program(present);
      if (sum.steps.empty()) continue;
      sum.add_operands(leaves);
      const Result got = run(sum, Isa::kReference, false);
      Array expected(DType::kFloat32, sum.count);
      for (int64_t i = 0; i < sum.count; ++i) {
        expected.as<float>()[i] = *tree_value<float>(leaves, present, i, 0, leaf_count);
      }
      expect_same_numbers(got.output, expected, "reference, leaves " + std::to_string(leaf_count));
      expect_tables_agree(sum, false, "absent every " + std::to_string(absent_every));
    }
  }
}

TEST(SumTree, EveryTableGivesTheReferencesBitsForAnyNumberOfLeaves) {
  unsigned seed = 0;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (int leaf_count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 70}) {
      for (int64_t count : ragged_counts()) {
        const std::vector<Array> leaves = leaves_of(dtype, leaf_count, count, ++seed);
        SumCase sum;
        sum.steps = tree_program(std::vector<bool>(static_cast<size_t>(leaf_count), true));
        sum.add_operands(leaves);
        sum.accumulate_fp64 = dtype == DType::kFloat64;
        sum.output_dtype = sum.accumulate_fp64 ? DType::kFloat64 : DType::kFloat32;
        const std::string what = dtype_name(dtype) + " leaves " + std::to_string(leaf_count);
        expect_tables_agree(sum, false, what);
        sum.epilogue.divide = true;
        sum.epilogue.divisor = leaf_count;
        expect_tables_agree(sum, true, what + " divided");
      }
    }
  }
}

TEST(SumTree, EveryEpilogueGivesTheReferencesBits) {
  const double divisors[] = {1, 3, 8, 0x1p-126, 0x1p126, 0x1p127, 0x1p-149, -4, 1e30};
  unsigned seed = 500;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const bool wide = dtype == DType::kFloat64;
    for (DType output : {wide ? DType::kFloat64 : DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (int leaf_count : {1, 3, 4, 6}) {
        const std::vector<Array> leaves = leaves_of(dtype, leaf_count, 999, ++seed);
        const Array base = awkward_array(wide ? DType::kFloat64 : DType::kFloat32, 999, Numbers::kAll, ++seed);
        SumCase sum;
        sum.steps = tree_program(std::vector<bool>(static_cast<size_t>(leaf_count), true));
        sum.add_operands(leaves);
        sum.accumulate_fp64 = wide;
        sum.output_dtype = output;
        for (double divisor : divisors) {
          sum.epilogue.divide = true;
          sum.epilogue.divisor = divisor;
          for (const void* given : {static_cast<const void*>(nullptr), static_cast<const void*>(base.data())}) {
            sum.epilogue.base = given;
            const std::string what =
                dtype_name(dtype) + " to " + dtype_name(output) + " divisor " + std::to_string(divisor);
            expect_tables_agree(sum, false, what);
            expect_tables_agree(sum, true, what + " checked");
          }
        }
      }
    }
  }
}

TEST(SumTree, LeavesOfDifferentDTypesAddUpInOneProgram) {
  for (int64_t count : ragged_counts()) {
    std::vector<Array> leaves;
    const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
    for (unsigned leaf = 0; leaf < 11; ++leaf)
      leaves.push_back(awkward_array(dtypes[leaf % 3], count, Numbers::kFinite, leaf));
    SumCase sum;
    sum.steps = tree_program(std::vector<bool>(11, true));
    sum.add_operands(leaves);
    expect_tables_agree(sum, true, "mixed");
  }
}

TEST(SumTree, AbsentLeavesKeepNegativeZero) {
  for (Isa isa : available_isas()) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      std::vector<Array> leaves = leaves_of(dtype, 5, 17, 3);
      for (int64_t i = 0; i < 17; ++i) leaves[3].set_bits(i, dtype == DType::kFloat32 ? 0x80000000 : 0x8000);
      SumCase sum;
      sum.steps = tree_program({false, false, false, true, false});
      sum.add_operands(leaves);
      sum.epilogue.divide = true;
      sum.epilogue.divisor = 5;
      const Result got = run(sum, isa, false);
      for (int64_t i = 0; i < 17; ++i) EXPECT_EQ(got.output.bits(i), 0x80000000u) << name(isa);
    }
  }
}

// Load 0, load 1, add, store 1 (on top of operand 0); load 0 again, load 2, add, store 0 (on top of operand 2).
TEST(SumTree, OutputsOnTopOfOperandsSeeTheOldValues) {
  using Kind = SumStep::Kind;
  const std::vector<SumStep> steps = {{Kind::kLoad, 0}, {Kind::kLoad, 1}, {Kind::kAdd, 0}, {Kind::kStore, 1},
                                      {Kind::kLoad, 0}, {Kind::kLoad, 2}, {Kind::kAdd, 0}, {Kind::kStore, 0}};
  for (int64_t count : ragged_counts()) {
    const std::vector<Array> original = leaves_of(DType::kFloat32, 3, count, 11);
    for (Isa isa : available_isas()) {
      std::vector<Array> leaves(original);
      SumCase sum;
      sum.steps = steps;
      sum.add_operands(leaves);
      sum.outputs = {leaves[2].data(), leaves[0].data()};
      sum.run(isa);
      Array second(DType::kFloat32, count), first(DType::kFloat32, count);
      for (int64_t i = 0; i < count; ++i) {
        second.as<float>()[i] = original[0].as<float>()[i] + original[1].as<float>()[i];
        first.as<float>()[i] = original[0].as<float>()[i] + original[2].as<float>()[i];
      }
      expect_same_numbers(leaves[0], second, std::string(name(isa)) + " output 1");
      expect_same_numbers(leaves[2], first, std::string(name(isa)) + " output 0");
    }
  }
}

TEST(SumTree, WholeTreesWorkInPlace) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int leaf_count : {1, 2, 3, 4, 5, 8}) {
      const std::vector<Array> original = leaves_of(dtype, leaf_count, 1000, 21);
      SumCase sum;
      sum.steps = tree_program(std::vector<bool>(static_cast<size_t>(leaf_count), true));
      sum.output_dtype = dtype;
      sum.add_operands(original);
      const Result expected = run(sum, Isa::kReference, false);
      for (Isa isa : available_isas()) {
        std::vector<Array> leaves(original);
        SumCase in_place(sum);
        in_place.operands.clear();
        in_place.add_operands(leaves);
        in_place.outputs = {leaves.back().data()};
        in_place.run(isa);
        expect_same_numbers(leaves.back(), expected.output, std::string(name(isa)) + " " + dtype_name(dtype));
      }
    }
  }
}

TEST(SumTree, SquareSumsAreThoseOfNormBlocks) {
  for (Isa isa : available_isas()) {
    for (int64_t count : ragged_counts()) {
      const std::vector<Array> leaves = leaves_of(DType::kBFloat16, 4, count, 31);
      SumCase sum;
      sum.steps = tree_program(std::vector<bool>(4, true));
      sum.add_operands(leaves);
      const Result got = run(sum, isa, true);
      Array norms(DType::kFloat64, got.squares.count());
      kernels(isa).norm_blocks({NormKind::kSquare, got.output.data(), DType::kFloat32, count, norms.as<double>()});
      expect_same_numbers(got.squares, norms, name(isa));
    }
  }
}

TEST(SumTree, TheNonfiniteFlagFindsOneBadElementAnywhereAndIsNeverCleared) {
  for (Isa isa : available_isas()) {
    for (uint32_t bad : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u}) {
      for (int64_t position : {0, 15, 16, 255, 256, 298}) {
        Array leaf = awkward_array(DType::kFloat32, 299, Numbers::kFinite, 41);
        SumCase sum;
        sum.steps = tree_program({true});
        sum.operands = {{leaf.data(), DType::kFloat32}};
        sum.count = 299;
        Array output(DType::kFloat32, 299);
        sum.outputs = {output.data()};
        uint8_t nonfinite = 0;
        sum.epilogue.nonfinite = &nonfinite;
        sum.run(isa);
        EXPECT_EQ(nonfinite, 0) << name(isa);
        leaf.set_bits(position, bad);
        sum.run(isa);
        EXPECT_EQ(nonfinite, 1) << name(isa) << " position " << position;
        leaf.set_bits(position, 0);
        sum.run(isa);
        EXPECT_EQ(nonfinite, 1) << name(isa);
      }
    }
  }
}

// ---- field cases: the mean of 16-bit leaves ----

double mean_of(Isa isa, DType dtype, const std::vector<double>& values, DType output, double divisor) {
  std::vector<Array> leaves;
  for (double value : values) {
    leaves.emplace_back(dtype, 1);
    kernels(Isa::kReference).cast(&value, DType::kFloat64, leaves.back().data(), dtype, 1);
  }
  SumCase sum;
  sum.steps = tree_program(std::vector<bool>(values.size(), true));
  sum.add_operands(leaves);
  sum.output_dtype = output;
  sum.epilogue.divide = true;
  sum.epilogue.divisor = divisor;
  return run(sum, isa, false).output.value(0);
}

TEST(SumTree, FieldCase2SixteenBitLeavesAreSummedInFloat32) {
  for (Isa isa : available_isas()) {
    EXPECT_EQ(mean_of(isa, DType::kBFloat16, {256, 1, 1, 1}, DType::kFloat32, 4), 64.75) << name(isa);
    EXPECT_EQ(mean_of(isa, DType::kBFloat16, std::vector<double>(70, 1), DType::kBFloat16, 1), 70) << name(isa);
    EXPECT_EQ(mean_of(isa, DType::kFloat16, {2048, 1, 1, 1}, DType::kFloat32, 4), 512.75) << name(isa);
    EXPECT_EQ(mean_of(isa, DType::kBFloat16, {256, 1, -256}, DType::kFloat32, 1), 1) << name(isa);
  }
}

TEST(SumTree, FieldCase4TheMeanOfFloat16LeavesNeitherOverflowsNorVanishes) {
  for (Isa isa : available_isas()) {
    for (size_t ranks : {3u, 4u, 5u, 8u}) {
      const auto divisor = static_cast<double>(ranks);
      EXPECT_EQ(mean_of(isa, DType::kFloat16, std::vector<double>(ranks, 30000), DType::kFloat16, divisor), 30000)
          << name(isa);
      EXPECT_EQ(mean_of(isa, DType::kFloat16, std::vector<double>(ranks, 0x1p-24), DType::kFloat16, divisor), 0x1p-24)
          << name(isa);
      std::vector<double> opposed(ranks, -60000);
      opposed[0] = 60000;
      EXPECT_TRUE(std::isfinite(mean_of(isa, DType::kFloat16, opposed, DType::kFloat16, divisor))) << name(isa);
    }
  }
}

}  // namespace
}  // namespace trueshard::kernels::test
