// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/kernels/kernel_data.h"

namespace trueshard::kernels::test {
namespace {

const DType kAllDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

uint16_t narrow(Isa isa, uint32_t bits, DType dtype) {
  uint16_t out = 0;
  kernels(isa).cast(&bits, DType::kFloat32, &out, dtype, 1);
  return out;
}

struct Known {
  uint32_t from;
  uint16_t to;
};

TEST(Cast, KnownValuesRoundToNearestEvenInBFloat16) {
  const Known cases[] = {
      {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82},
      {0x3f808001, 0x3f81}, {0x80000000, 0x8000}, {0x000ae398, 0x000b},  // a denormal that vcvtneps2bf16 flushes
      {0x7f7fffff, 0x7f80}, {0xff800000, 0xff80},                        // overflow by rounding, infinity
      {0x00008000, 0x0000}, {0x00008001, 0x0001},
  };
  for (Isa isa : available_isas()) {
    for (const Known& known : cases) {
      EXPECT_EQ(narrow(isa, known.from, DType::kBFloat16), known.to) << name(isa) << std::hex << " " << known.from;
    }
    EXPECT_TRUE(is_nan_bits(narrow(isa, 0x7f800001, DType::kBFloat16), DType::kBFloat16)) << name(isa);
    EXPECT_TRUE(is_nan_bits(narrow(isa, 0xffffffff, DType::kBFloat16), DType::kBFloat16)) << name(isa);
  }
}

TEST(Cast, KnownValuesRoundToNearestEvenInFloat16) {
  const Known cases[] = {
      {0x3f800000, 0x3c00}, {0x477fe000, 0x7bff},
      {0x477fefff, 0x7bff}, {0x477ff000, 0x7c00},  // 65504, below and at 65520
      {0x33800000, 0x0001}, {0x33000000, 0x0000},
      {0x33000001, 0x0001}, {0x33c00000, 0x0002},  // 2^-24, ties, 1.5 * 2^-24
      {0x387fc000, 0x03ff}, {0x387fffff, 0x0400},
      {0x80000001, 0x8000}, {0x7f800000, 0x7c00},
  };
  for (Isa isa : available_isas()) {
    for (const Known& known : cases) {
      EXPECT_EQ(narrow(isa, known.from, DType::kFloat16), known.to) << name(isa) << std::hex << " " << known.from;
    }
    EXPECT_TRUE(is_nan_bits(narrow(isa, 0x7f800001, DType::kFloat16), DType::kFloat16)) << name(isa);
  }
}

TEST(Cast, EverySixteenBitPatternWidensExactlyAndComesBack) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Array all(dtype, 65536);
    for (int64_t i = 0; i < all.count(); ++i) all.set_bits(i, static_cast<uint64_t>(i));
    for (Isa isa : available_isas()) {
      for (DType wide : {DType::kFloat32, DType::kFloat64}) {
        Array widened(wide, all.count()), back(dtype, all.count());
        kernels(isa).cast(all.data(), dtype, widened.data(), wide, all.count());
        kernels(isa).cast(widened.data(), wide, back.data(), dtype, all.count());
        for (int64_t i = 0; i < all.count(); ++i) {
          if (is_nan_bits(all.bits(i), dtype)) {
            ASSERT_TRUE(is_nan_bits(widened.bits(i), wide) && is_nan_bits(back.bits(i), dtype))
                << name(isa) << " " << i;
          } else {
            ASSERT_EQ(back.bits(i), all.bits(i)) << name(isa) << " " << dtype_name(dtype);
          }
        }
      }
    }
  }
}

TEST(Cast, NeighboursOfEveryTieRoundLikeTheReference) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Array halves(dtype, 65536);
    for (int64_t i = 0; i < halves.count(); ++i) halves.set_bits(i, static_cast<uint64_t>(i));
    Array wide(DType::kFloat32, halves.count());
    kernels(Isa::kReference).cast(halves.data(), dtype, wide.data(), DType::kFloat32, halves.count());
    for (int offset : {-1, 0, 1}) {
      Array near(DType::kFloat32, halves.count());
      for (int64_t i = 0; i + 1 < halves.count(); ++i) {
        const double middle = (wide.value(i) + wide.value(i + 1)) / 2;  // NaN and inf stay what they are
        const float tie = static_cast<float>(middle);
        uint32_t bits;
        std::memcpy(&bits, &tie, sizeof(bits));
        near.set_bits(i, bits + static_cast<uint32_t>(offset));
      }
      Array expected(dtype, near.count());
      kernels(Isa::kReference).cast(near.data(), DType::kFloat32, expected.data(), dtype, near.count());
      for (Isa isa : fast_isas()) {
        Array got(dtype, near.count());
        kernels(isa).cast(near.data(), DType::kFloat32, got.data(), dtype, near.count());
        expect_same_bits(got, expected, name(isa));
      }
    }
  }
}

TEST(Cast, EveryTableGivesTheReferencesBitsInEveryPairOfDTypes) {
  unsigned seed = 0;
  for (DType in : kAllDTypes) {
    for (DType out : kAllDTypes) {
      for (int64_t count : ragged_counts()) {
        const Array source = awkward_array(in, count, Numbers::kAll, ++seed);
        Array expected(out, count);
        kernels(Isa::kReference).cast(source.data(), in, expected.data(), out, count);
        for (Isa isa : fast_isas()) {
          const std::string what = std::string(name(isa)) + " " + dtype_name(in) + " to " + dtype_name(out);
          Array got(out, count);
          kernels(isa).cast(source.data(), in, got.data(), out, count);
          if (itemsize(out) > itemsize(in)) {
            expect_same_numbers(got, expected, what);  // a signalling NaN may be widened as it is
          } else {
            expect_same_bits(got, expected, what);
          }
          if (itemsize(in) != itemsize(out)) continue;
          Array in_place(source);
          kernels(isa).cast(in_place.data(), in, in_place.data(), out, count);
          for (int64_t i = 0; i < count; ++i) ASSERT_EQ(in_place.bits(i), expected.bits(i)) << what << " in place";
        }
      }
    }
  }
}

TEST(Cast, Float64IsRoundedOnceToSixteenBits) {
  // 1 + 2^-8 + 2^-30 lies just above a bfloat16 tie that a detour over fp32 would fall onto.
  const double value = 1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -30);
  const double half_value = 1.0 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
  for (Isa isa : available_isas()) {
    uint16_t out = 0;
    kernels(isa).cast(&value, DType::kFloat64, &out, DType::kBFloat16, 1);
    EXPECT_EQ(out, 0x3f81) << name(isa);
    kernels(isa).cast(&half_value, DType::kFloat64, &out, DType::kFloat16, 1);
    EXPECT_EQ(out, 0x3c01) << name(isa);
  }
}

}  // namespace
}  // namespace trueshard::kernels::test
