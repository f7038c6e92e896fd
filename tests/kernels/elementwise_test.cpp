// SPDX-License-Identifier: BSD-3-Clause
// scale, unscale_and_check and norm_blocks: every table against the reference, and the reference against definitions.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/kernels/sum_programs.h"

namespace trueshard::kernels::test {
namespace {

const DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

TEST(Scale, EveryTableGivesTheReferencesBits) {
  unsigned seed = 0;
  for (DType dtype : kAllDTypes) {
    for (double factor : {1.0, 0.37, 1.0 / 3, 65536.0, 1e-30}) {
      for (int64_t count : ragged_counts()) {
        const Array data = awkward_array(dtype, count, Numbers::kAll, ++seed);
        Array expected(data);
        kernels(Isa::kReference).scale(expected.data(), dtype, count, factor);
        for (Isa isa : fast_isas()) {
          Array got(data);
          kernels(isa).scale(got.data(), dtype, count, factor);
          expect_same_numbers(got, expected, std::string(name(isa)) + " " + dtype_name(dtype));
        }
      }
    }
  }
}

TEST(Scale, SixteenBitDataAreMultipliedInFloat32AndRoundedOnce) {
  for (Isa isa : available_isas()) {
    float value = 3.0f;  // 3 * 0.1f = 0.3f in fp32
    uint16_t half = 0;
    kernels(isa).cast(&value, DType::kFloat32, &half, DType::kBFloat16, 1);
    kernels(isa).scale(&half, DType::kBFloat16, 1, 0.1);
    const float product = 3.0f * 0.1f;
    uint16_t expected = 0;
    kernels(isa).cast(&product, DType::kFloat32, &expected, DType::kBFloat16, 1);
    EXPECT_EQ(half, expected) << name(isa);
  }
}

TEST(Unscale, EveryTableGivesTheReferencesBitsAndFlag) {
  unsigned seed = 100;
  for (DType dtype : kAllDTypes) {
    for (Numbers numbers : {Numbers::kAll, Numbers::kFinite}) {
      for (int64_t count : ragged_counts()) {
        const Array data = awkward_array(dtype, count, numbers, ++seed);
        Array expected(data);
        uint8_t expected_flag = 0;
        kernels(Isa::kReference).unscale_and_check(expected.data(), dtype, count, 1.0 / 3, &expected_flag);
        for (Isa isa : fast_isas()) {
          Array got(data);
          uint8_t flag = 0;
          kernels(isa).unscale_and_check(got.data(), dtype, count, 1.0 / 3, &flag);
          expect_same_numbers(got, expected, std::string(name(isa)) + " " + dtype_name(dtype));
          EXPECT_EQ(flag, expected_flag) << name(isa) << " " << dtype_name(dtype) << " " << count;
        }
      }
    }
  }
}

TEST(Unscale, TheFlagLooksAtTheInputAndIsNeverCleared) {
  for (Isa isa : available_isas()) {
    uint8_t flag = 0;
    float large = std::numeric_limits<float>::max();
    kernels(isa).unscale_and_check(&large, DType::kFloat32, 1, 2.0,
                                   &flag);  // the product overflows, the input is finite
    EXPECT_EQ(flag, 0) << name(isa);
    EXPECT_TRUE(std::isinf(large)) << name(isa);
    kernels(isa).unscale_and_check(&large, DType::kFloat32, 1, 0.5, &flag);
    EXPECT_EQ(flag, 1) << name(isa);
    float fine = 1.0f;
    kernels(isa).unscale_and_check(&fine, DType::kFloat32, 1, 0.5, &flag);
    EXPECT_EQ(flag, 1) << name(isa);
  }
}

// ---- norm_blocks ----

Array norms(Isa isa, NormCall call, const Array& data) {
  Array values(DType::kFloat64, (data.count() + kBlock - 1) / kBlock);
  call.data = data.data();
  call.dtype = data.dtype();
  call.count = data.count();
  call.block_values = values.as<double>();
  kernels(isa).norm_blocks(call);
  return values;
}

NormCall norm_call(NormKind kind, double scale = 1.0, double power = 0.0) {
  return {kind, nullptr, DType::kFloat32, 0, nullptr, scale, power};
}

const NormCall kNormCalls[] = {norm_call(NormKind::kSquare),          norm_call(NormKind::kSquare, 0x1p-300),
                               norm_call(NormKind::kSquare, 0.3),     norm_call(NormKind::kAbsolute),
                               norm_call(NormKind::kMaximum),         norm_call(NormKind::kPower, 1.0, 3.0),
                               norm_call(NormKind::kPower, 0.25, 0.5)};

TEST(NormBlocks, EveryTableGivesTheReferencesBits) {
  unsigned seed = 200;
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const NormCall& call : kNormCalls) {
      for (Numbers numbers : {Numbers::kAll, Numbers::kFinite}) {
        for (int64_t count : ragged_counts()) {
          const Array data = awkward_array(dtype, count, numbers, ++seed);
          const Array expected = norms(Isa::kReference, call, data);
          for (Isa isa : fast_isas()) {
            const std::string kind = std::to_string(static_cast<int>(call.kind));
            expect_same_numbers(norms(isa, call, data), expected, std::string(name(isa)) + " kind " + kind);
          }
        }
      }
    }
  }
}

// Rows of one lane in the canonical tree, then the lanes: written once more from the contract's text.
TEST(NormBlocks, TheReferenceAddsRowsThenLanesInTheCanonicalTree) {
  const Array data = awkward_array(DType::kFloat32, 3 * kBlock + 77, Numbers::kFinite, 300);
  const Array got = norms(Isa::kReference, norm_call(NormKind::kSquare), data);
  for (int64_t block = 0; block < got.count(); ++block) {
    std::vector<Array> lanes;
    for (int64_t lane = 0; lane < 16; ++lane) {
      std::vector<Array> rows;
      for (int64_t row = 0; row < 16; ++row) {
        const int64_t i = block * kBlock + row * 16 + lane;
        rows.emplace_back(DType::kFloat64, 1);
        *rows.back().as<double>() = i < data.count() ? data.value(i) * data.value(i) : 0.0;
      }
      lanes.emplace_back(DType::kFloat64, 1);
      *lanes.back().as<double>() = *tree_value<double>(rows, std::vector<bool>(16, true), 0, 0, 16);
    }
    EXPECT_EQ(got.value(block), *tree_value<double>(lanes, std::vector<bool>(16, true), 0, 0, 16));
  }
}

TEST(NormBlocks, TheMaximumIsNanWhereverTheNanStands) {
  for (Isa isa : available_isas()) {
    for (int64_t position : {0, 1, 16, 255}) {
      Array data = awkward_array(DType::kFloat32, kBlock, Numbers::kFinite, 310);
      data.set_bits((position + 7) % kBlock, 0x7f800000);
      EXPECT_TRUE(std::isinf(norms(isa, norm_call(NormKind::kMaximum), data).value(0))) << name(isa);
      data.set_bits(position, 0xff800001);  // a signalling NaN with the sign set
      EXPECT_TRUE(std::isnan(norms(isa, norm_call(NormKind::kMaximum), data).value(0))) << name(isa);
    }
  }
}

TEST(NormBlocks, HugeAndTinyValuesHaveFiniteNonzeroSquares) {
  for (Isa isa : available_isas()) {
    for (float value : {1e20f, 1e-30f, 1e-45f, std::numeric_limits<float>::max()}) {
      Array data(DType::kFloat32, 4);
      for (int64_t i = 0; i < 4; ++i) data.as<float>()[i] = value;
      const double expected = 4.0 * (static_cast<double>(value) * static_cast<double>(value));
      EXPECT_EQ(norms(isa, norm_call(NormKind::kSquare), data).value(0), expected) << name(isa);
    }
  }
}

}  // namespace
}  // namespace trueshard::kernels::test
