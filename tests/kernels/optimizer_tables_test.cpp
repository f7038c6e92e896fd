// SPDX-License-Identifier: BSD-3-Clause
// adam and sgd: every table against the reference. libtorch itself: libtorch_optimizer_bits_test.cpp.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/kernel_data.h"

namespace trueshard::kernels::test {
namespace {

void exact_sqrt(float* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i) data[i] = std::sqrt(data[i]);
}

// One bit a feature, so that a loop over numbers visits every combination.
enum Feature : unsigned {
  kDecoupled = 1,
  kAmsgrad = 2,
  kFused = 4,
  kDecay = 8,
  kFactors = 16,
  kFloat16Copy = 32,
  kAdamEnd = 64
};

struct Operands {
  Array parameter, gradient, first, second, largest, copy;
  Operands(int64_t count, DType copy_dtype, unsigned seed)
      : parameter(awkward_array(DType::kFloat32, count, Numbers::kAll, seed)),
        gradient(awkward_array(DType::kFloat32, count, Numbers::kAll, seed + 1)),
        first(awkward_array(DType::kFloat32, count, Numbers::kAll, seed + 2)),
        second(awkward_array(DType::kFloat32, count, Numbers::kAll, seed + 3)),
        largest(awkward_array(DType::kFloat32, count, Numbers::kAll, seed + 4)),
        copy(copy_dtype, count) {}
};

void expect_same(const Operands& got, const Operands& expected, const std::string& what) {
  expect_same_numbers(got.parameter, expected.parameter, what + " parameter");
  expect_same_bits(got.gradient, expected.gradient, what + " gradient");
  expect_same_numbers(got.first, expected.first, what + " first");
  expect_same_numbers(got.second, expected.second, what + " second");
  expect_same_numbers(got.largest, expected.largest, what + " largest");
  expect_same_numbers(got.copy, expected.copy, what + " copy");
}

GradientFactors factors_of(unsigned features) {
  const bool used = (features & kFactors) != 0;
  return {used, 1.0f / 1000, used, 0.71f};
}

void run_adam(Isa isa, const Operands& o, unsigned features) {
  kernels(isa).adam({o.parameter.count(),
                     o.parameter.as<float>(),
                     o.gradient.as<float>(),
                     o.first.as<float>(),
                     o.second.as<float>(),
                     (features & kAmsgrad) != 0 ? o.largest.as<float>() : nullptr,
                     {o.copy.data(), o.copy.dtype()},
                     factors_of(features),
                     (features & kDecoupled) != 0,
                     1e-3,
                     0.9,
                     0.999,
                     1e-8,
                     (features & kDecay) != 0 ? 0.05 : 0.0,
                     3,
                     exact_sqrt,
                     (features & kFused) != 0});
}

TEST(OptimizerTables, AdamHasTheReferencesBitsWithEveryFeature) {
  for (unsigned features = 0; features < kAdamEnd; ++features) {
    const DType copy = (features & kFloat16Copy) != 0 ? DType::kFloat16 : DType::kBFloat16;
    for (int64_t count : ragged_counts()) {
      const Operands given(count, copy, features * 16);
      const Operands expected(given);
      run_adam(Isa::kReference, expected, features);
      for (Isa isa : fast_isas()) {
        const Operands got(given);
        run_adam(isa, got, features);
        expect_same(got, expected, std::string(name(isa)) + " features " + std::to_string(features));
      }
    }
  }
}

enum SgdFeature : unsigned {
  kMomentum = 1,
  kNesterov = 2,
  kSgdFused = 4,
  kSgdDecay = 8,
  kSgdFactors = 16,
  kFirst = 32,
  kSgdEnd = 64
};

void run_sgd(Isa isa, const Operands& o, unsigned features) {
  kernels(isa).sgd({o.parameter.count(),
                    o.parameter.as<float>(),
                    o.gradient.as<float>(),
                    (features & kMomentum) != 0 ? o.first.as<float>() : nullptr,
                    (features & kFirst) != 0,
                    {o.copy.data(), o.copy.dtype()},
                    factors_of(features),
                    0.03,
                    (features & kMomentum) != 0 ? 0.9 : 0.0,
                    (features & kNesterov) != 0 ? 0.0 : 0.2,
                    (features & kSgdDecay) != 0 ? 0.01 : 0.0,
                    (features & kMomentum) != 0 && (features & kNesterov) != 0,
                    (features & kSgdFused) != 0});
}

TEST(OptimizerTables, SgdHasTheReferencesBitsWithEveryFeature) {
  for (unsigned features = 0; features < kSgdEnd; ++features) {
    for (int64_t count : ragged_counts()) {
      const Operands given(count, DType::kBFloat16, features * 16);
      const Operands expected(given);
      run_sgd(Isa::kReference, expected, features);
      for (Isa isa : fast_isas()) {
        const Operands got(given);
        run_sgd(isa, got, features);
        expect_same(got, expected, std::string(name(isa)) + " features " + std::to_string(features));
      }
    }
  }
}

TEST(OptimizerTables, NoCopyIsWrittenWhenNoneIsAskedFor) {
  for (Isa isa : available_isas()) {
    float parameter = 1.0f;
    const float gradient = 1.0f;
    kernels(isa).sgd({1, &parameter, &gradient, nullptr, true, {}, {}, 0.25, 0.0, 0.0, 0.0, false, true});
    EXPECT_EQ(parameter, 0.75f) << name(isa);
  }
}

TEST(OptimizerTables, FusedAndSeparateRoundingsAreBothReachable) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(1.0f, 2.0f);
  int different = 0;
  for (int i = 0; i < 1000; ++i) {
    const float gradient = uniform(random);
    float fused = 1.0f, separate = 1.0f;
    for (Isa isa : available_isas()) {
      fused = separate = 1.0f;
      kernels(isa).sgd({1, &fused, &gradient, nullptr, true, {}, {}, 0.1, 0.0, 0.0, 0.0, false, true});
      kernels(isa).sgd({1, &separate, &gradient, nullptr, true, {}, {}, 0.1, 0.0, 0.0, 0.0, false, false});
      EXPECT_EQ(fused, std::fma(gradient, -0.1f, 1.0f)) << name(isa);
    }
    different += fused != separate;
  }
  EXPECT_GT(different, 0);
}

}  // namespace
}  // namespace trueshard::kernels::test
