// SPDX-License-Identifier: BSD-3-Clause
// Kernels bring their own floating-point state and give the caller's back; tables can be named in the environment.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <stdexcept>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "tests/kernels/sum_programs.h"

namespace trueshard::kernels::test {
namespace {

void exact_sqrt(float* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i) data[i] = std::sqrt(data[i]);
}

#if defined(__x86_64__)
constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundUp = 0x4000, kRoundDown = 0x2000,
                   kChop = 0x6000;
constexpr unsigned kAllMasked = 0x1f80;

class CallerState {
 public:
  explicit CallerState(unsigned state) : saved_(_mm_getcsr()) { _mm_setcsr(state); }
  ~CallerState() { _mm_setcsr(saved_); }
  CallerState(const CallerState&) = delete;
  CallerState& operator=(const CallerState&) = delete;

 private:
  unsigned saved_;
};

// Runs `kernel` under `state` and says whether the state was still there afterwards.
bool keeps_state(unsigned state, const std::function<void()>& kernel) {
  CallerState caller(state);
  kernel();
  return _mm_getcsr() == state;
}

// All kernels on awkward numbers, every result in one array of bits.
std::vector<uint64_t> results_of(Isa isa, unsigned state) {
  constexpr int64_t kCount = 300;
  std::vector<Array> leaves;
  for (unsigned leaf = 0; leaf < 3; ++leaf)
    leaves.push_back(awkward_array(DType::kFloat32, kCount, Numbers::kFinite, leaf));
  Array sum_output(DType::kFloat32, kCount), squares(DType::kFloat64, 2), narrowed(DType::kBFloat16, kCount);
  Array scaled(leaves[0]), unscaled(leaves[1]), halves(DType::kFloat16, kCount), maximum(DType::kFloat64, 2);
  Array parameter(leaves[0]), first(leaves[1]), second(DType::kFloat32, kCount), moved(leaves[2]);
  for (int64_t i = 0; i < kCount; ++i) second.as<float>()[i] = std::fabs(leaves[2].as<float>()[i]);
  SumCase sum;
  sum.steps = tree_program({true, true, true});
  sum.add_operands(leaves);
  sum.outputs = {sum_output.data()};
  sum.epilogue.divide = true;
  sum.epilogue.divisor = 3;
  uint8_t nonfinite = 0;
  sum.epilogue.nonfinite = &nonfinite;
  sum.epilogue.square_sums = squares.as<double>();
  const Kernels& table = kernels(isa);
  const AdamCall adam{kCount,
                      parameter.as<float>(),
                      leaves[1].as<float>(),
                      first.as<float>(),
                      second.as<float>(),
                      nullptr,
                      {},
                      {},
                      true,
                      1e-3,
                      0.9,
                      0.999,
                      1e-8,
                      0.01,
                      2,
                      exact_sqrt,
                      true};
  const SgdCall sgd{kCount, moved.as<float>(), leaves[1].as<float>(), nullptr, true, {}, {}, 0.1, 0, 0, 0.01, false,
                    false};
  const std::vector<std::function<void()>> calls = {
      [&] { sum.run(isa); },
      [&] { table.cast(leaves[0].data(), DType::kFloat32, narrowed.data(), DType::kBFloat16, kCount); },
      [&] { table.cast(leaves[0].data(), DType::kFloat32, halves.data(), DType::kFloat16, kCount); },
      [&] { table.scale(scaled.data(), DType::kFloat32, kCount, 1.0 / 3); },
      [&] { table.unscale_and_check(unscaled.data(), DType::kFloat32, kCount, 1.0 / 3, &nonfinite); },
      [&] {
        table.norm_blocks({NormKind::kMaximum, leaves[0].data(), DType::kFloat32, kCount, maximum.as<double>()});
      },
      [&] { table.adam(adam); },
      [&] { table.sgd(sgd); },
  };
  for (size_t call = 0; call < calls.size(); ++call)
    EXPECT_TRUE(keeps_state(state, calls[call])) << name(isa) << " call " << call;
  std::vector<uint64_t> bits = {nonfinite};
  for (const Array* array :
       {&sum_output, &squares, &narrowed, &halves, &scaled, &unscaled, &maximum, &parameter, &first, &second, &moved}) {
    for (int64_t i = 0; i < array->count(); ++i) bits.push_back(array->bits(i));
  }
  return bits;
}

TEST(FloatState, ResultsDoNotDependOnTheCallersRoundingOrFlushing) {
  for (Isa isa : available_isas()) {
    const std::vector<uint64_t> expected = results_of(isa, kAllMasked);
    for (unsigned state : {kAllMasked | kFlushToZero | kDenormalsAreZero, kAllMasked | kRoundUp,
                           kAllMasked | kRoundDown, kAllMasked | kChop | kFlushToZero, kAllMasked | 0x3fu}) {
      EXPECT_EQ(results_of(isa, state), expected) << name(isa) << std::hex << " state " << state;
    }
  }
}

TEST(FloatState, CallersThatTrapExceptionsAreNotTrappedInside) {
  const unsigned trapping = kAllMasked & ~0x1e80u;  // all but "inexact" unmasked
  for (Isa isa : available_isas()) {
    float value = 3e38f;
    EXPECT_TRUE(keeps_state(trapping, [&] { kernels(isa).scale(&value, DType::kFloat32, 1, 1e30); })) << name(isa);
    EXPECT_TRUE(std::isinf(value)) << name(isa);
  }
}
#endif

TEST(Tables, TheReferenceComesFirstAndEveryListedTableAnswersToItsName) {
  const std::vector<Isa> isas = available_isas();
  ASSERT_GE(isas.size(), 2u);
  EXPECT_EQ(isas[0], Isa::kReference);
  EXPECT_EQ(isas[1], Isa::kScalar);
  for (Isa isa : isas) EXPECT_EQ(kernels(isa).isa, isa) << name(isa);
}

TEST(Tables, TrueshardIsaChoosesTheTableAndAnUnknownNameIsRefusedWithTheNamesThatWork) {
  // The choice is made at first use and kept: this is the only test that calls kernels().
  ASSERT_EQ(setenv("TRUESHARD_ISA", "sse9", 1), 0);
  try {
    kernels();
    FAIL() << "an unknown table was accepted";
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("TRUESHARD_ISA is 'sse9'"), std::string::npos) << text;
    EXPECT_NE(text.find("reference, scalar"), std::string::npos) << text;
  }
  ASSERT_EQ(setenv("TRUESHARD_ISA", "scalar", 1), 0);
  EXPECT_EQ(kernels().isa, Isa::kScalar);
  ASSERT_EQ(unsetenv("TRUESHARD_ISA"), 0);
  EXPECT_EQ(kernels().isa, Isa::kScalar);
}

}  // namespace
}  // namespace trueshard::kernels::test
