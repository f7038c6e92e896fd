// SPDX-License-Identifier: BSD-3-Clause
// The fused optimizer kernels against torch::optim in this process's CPU capability (ATEN_CPU_CAPABILITY), bit by bit.
// ctest runs the program once for each capability.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace trueshard::kernels {
namespace {

using Numbers = std::vector<float>;

std::string wanted_capability() {
  const char* text = std::getenv("ATEN_CPU_CAPABILITY");
  return text == nullptr ? "" : text;
}

// libtorch believes ATEN_CPU_CAPABILITY without asking the processor: this must be known before its first kernel runs.
bool processor_has(const std::string& capability) {
  const std::vector<Isa> isas = available_isas();
  const Isa needed = capability == "avx512" ? Isa::kAvx512 : capability == "avx2" ? Isa::kAvx2 : Isa::kScalar;
  return std::find(isas.begin(), isas.end(), needed) != isas.end();
}

void libtorch_sqrt(float* data, int64_t count) { at::from_blob(data, {count}, at::kFloat).sqrt_(); }

Numbers numbers_of(const torch::Tensor& tensor) {
  const torch::Tensor flat = tensor.detach().contiguous();
  return Numbers(flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel());
}

// Gradients of many magnitudes: ordinary, denormal, huge, zeros of both signs; in the last step infinities and NaN.
torch::Tensor gradient_for(const torch::Tensor& parameter, int step, bool last) {
  std::mt19937 random(static_cast<unsigned>(step));
  std::normal_distribution<float> normal;
  Numbers values(static_cast<size_t>(parameter.numel()));
  const float scales[] = {1.0f, 1e-3f, 1e-42f, 1e30f, 1e-20f, 0.0f, -0.0f, 1e4f};
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = normal(random) * scales[(i / 3 + static_cast<size_t>(step)) % 8];
  if (last) {
    const float infinity = std::numeric_limits<float>::infinity();
    const float odd[] = {infinity, -infinity, std::nanf("")};
    for (size_t i = 0; i < values.size(); i += 5) values[i] = odd[i / 5 % 3];
  }
  return torch::from_blob(values.data(), parameter.sizes(), torch::kFloat).clone();
}

void expect_same_bits(const Numbers& ours, const Numbers& libtorch, const std::string& what) {
  ASSERT_EQ(ours.size(), libtorch.size()) << what;
  int different = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const bool both_nan = std::isnan(ours[i]) && std::isnan(libtorch[i]);
    if (both_nan || std::memcmp(&ours[i], &libtorch[i], sizeof(float)) == 0) continue;
    if (++different <= 3) ADD_FAILURE() << what << " element " << i << ": " << ours[i] << " libtorch " << libtorch[i];
  }
  EXPECT_EQ(different, 0) << what;
}

struct Factors {
  bool used = false;
  float inverse_scale = 1.0f / 1024, clip = 0.37f;
};

struct State {
  Numbers parameter, first, second, largest;
  std::vector<uint16_t> copy;
};

struct Piece {
  int64_t begin, count;
};
// The kernels run on two shards of the parameter, libtorch on the whole of it.
std::vector<Piece> shards_of(int64_t count) { return {{0, count / 3}, {count / 3, count - count / 3}}; }

GradientFactors factors_of(const Factors& factors) {
  return {factors.used, factors.inverse_scale, factors.used, factors.clip};
}

torch::Tensor apply_factors(const torch::Tensor& gradient, const Factors& factors) {
  return factors.used ? gradient.mul(factors.inverse_scale).mul(factors.clip) : gradient;
}

void expect_copy_rounds_parameter(const State& state, const std::string& what) {
  const torch::Tensor expected =
      torch::from_blob(const_cast<float*>(state.parameter.data()), {static_cast<int64_t>(state.parameter.size())})
          .to(torch::kBFloat16);
  for (size_t i = 0; i < state.copy.size(); ++i) {
    if (std::isnan(state.parameter[i])) continue;
    uint16_t bits;
    std::memcpy(&bits, expected.const_data_ptr<at::BFloat16>() + i, sizeof(bits));
    ASSERT_EQ(state.copy[i], bits) << what << " copy of element " << i;
  }
}

const std::vector<std::vector<int64_t>> kShapes = {{1}, {7}, {33, 5}, {2, 3, 4, 17}, {4099}};
constexpr int kSteps = 6;

class LibtorchBits : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string wanted = wanted_capability();
    if (!processor_has(wanted)) GTEST_SKIP() << "this processor has no " << wanted;
    torch::set_num_threads(1);
    vector_fma_ = at::get_cpu_capability() != "DEFAULT";
    if (wanted == "default") {
      ASSERT_FALSE(vector_fma_);
    } else if (!wanted.empty()) {
      ASSERT_TRUE(vector_fma_) << at::get_cpu_capability();
    }
  }
  bool vector_fma_ = false;
};

// ---- Adam and AdamW ----

struct AdamCase {
  bool decoupled;
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad;
  Factors factors;
};

std::string describe(const AdamCase& c, Isa isa, size_t shape, int step) {
  return std::string(c.decoupled ? "AdamW" : "Adam") + " " + name(isa) + " shape " + std::to_string(shape) + " lr " +
         std::to_string(c.lr) + " decay " + std::to_string(c.weight_decay) + (c.amsgrad ? " amsgrad" : "") +
         (c.factors.used ? " factors" : "") + " step " + std::to_string(step);
}

void adam_step(const AdamCase& c, Isa isa, bool vector_fma, const Numbers& gradient, int step, State& state) {
  for (const Piece& piece : shards_of(static_cast<int64_t>(gradient.size()))) {
    const int64_t at = piece.begin;
    AdamCall call{piece.count,
                  state.parameter.data() + at,
                  gradient.data() + at,
                  state.first.data() + at,
                  state.second.data() + at,
                  c.amsgrad ? state.largest.data() + at : nullptr,
                  {state.copy.data() + at, DType::kBFloat16},
                  factors_of(c.factors),
                  c.decoupled,
                  c.lr,
                  c.beta1,
                  c.beta2,
                  c.eps,
                  c.weight_decay,
                  step,
                  libtorch_sqrt,
                  vector_fma};
    kernels(isa).adam(call);
  }
}

template <class Optimizer, class Options, class ParamState>
void compare_adam(const AdamCase& c, bool vector_fma) {
  for (Isa isa : available_isas()) {
    for (size_t shape = 0; shape < kShapes.size(); ++shape) {
      torch::manual_seed(static_cast<uint64_t>(shape));
      torch::Tensor parameter = torch::randn(kShapes[shape]).set_requires_grad(true);
      Optimizer optimizer({parameter}, Options(c.lr)
                                           .betas(std::make_tuple(c.beta1, c.beta2))
                                           .eps(c.eps)
                                           .weight_decay(c.weight_decay)
                                           .amsgrad(c.amsgrad));
      const auto count = static_cast<size_t>(parameter.numel());
      State state{numbers_of(parameter), Numbers(count), Numbers(count), Numbers(count), std::vector<uint16_t>(count)};
      for (int step = 1; step <= kSteps; ++step) {
        const torch::Tensor gradient = gradient_for(parameter, step, step == kSteps);
        parameter.mutable_grad() = apply_factors(gradient, c.factors).clone();
        optimizer.step();
        adam_step(c, isa, vector_fma, numbers_of(gradient), step, state);
        const auto& theirs = static_cast<ParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
        const std::string what = describe(c, isa, shape, step);
        expect_same_bits(state.first, numbers_of(theirs.exp_avg()), what + " exp_avg");
        expect_same_bits(state.second, numbers_of(theirs.exp_avg_sq()), what + " exp_avg_sq");
        if (c.amsgrad) expect_same_bits(state.largest, numbers_of(theirs.max_exp_avg_sq()), what + " max_exp_avg_sq");
        expect_same_bits(state.parameter, numbers_of(parameter), what + " parameter");
        expect_copy_rounds_parameter(state, what);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

std::vector<AdamCase> adam_cases(bool decoupled) {
  std::vector<AdamCase> cases;
  for (double decay : {0.0, 1e-2, 0.1}) {
    for (bool amsgrad : {false, true}) {
      cases.push_back({decoupled, 1e-3, 0.9, 0.999, 1e-8, decay, amsgrad, {}});
      cases.push_back({decoupled, 0.07, 0.8, 0.95, 1e-6, decay, amsgrad, {true}});
    }
  }
  cases.push_back({decoupled, 1e-2, 0.0, 0.5, 1e-8, 0.3, false, {}});
  return cases;
}

TEST_F(LibtorchBits, AdamWGivesTheBitsOfTorchOptim) {
  for (const AdamCase& c : adam_cases(true)) {
    compare_adam<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState>(c, vector_fma_);
  }
}

TEST_F(LibtorchBits, AdamWithDecayInTheGradientGivesTheBitsOfTorchOptim) {
  for (const AdamCase& c : adam_cases(false)) {
    compare_adam<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>(c, vector_fma_);
  }
}

// ---- SGD ----

struct SgdCase {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  Factors factors;
};

std::string describe(const SgdCase& c, Isa isa, size_t shape, int step) {
  return std::string("SGD ") + name(isa) + " shape " + std::to_string(shape) + " momentum " +
         std::to_string(c.momentum) + " dampening " + std::to_string(c.dampening) + " decay " +
         std::to_string(c.weight_decay) + (c.nesterov ? " nesterov" : "") + (c.factors.used ? " factors" : "") +
         " step " + std::to_string(step);
}

void sgd_step(const SgdCase& c, Isa isa, bool vector_fma, const Numbers& gradient, int step, State& state) {
  for (const Piece& piece : shards_of(static_cast<int64_t>(gradient.size()))) {
    const int64_t at = piece.begin;
    SgdCall call{piece.count,
                 state.parameter.data() + at,
                 gradient.data() + at,
                 c.momentum != 0 ? state.first.data() + at : nullptr,
                 step == 1,
                 {state.copy.data() + at, DType::kBFloat16},
                 factors_of(c.factors),
                 c.lr,
                 c.momentum,
                 c.dampening,
                 c.weight_decay,
                 c.nesterov,
                 vector_fma};
    kernels(isa).sgd(call);
  }
}

void compare_sgd(const SgdCase& c, bool vector_fma) {
  for (Isa isa : available_isas()) {
    for (size_t shape = 0; shape < kShapes.size(); ++shape) {
      torch::manual_seed(static_cast<uint64_t>(shape));
      torch::Tensor parameter = torch::randn(kShapes[shape]).set_requires_grad(true);
      torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(c.lr)
                                                   .momentum(c.momentum)
                                                   .dampening(c.dampening)
                                                   .weight_decay(c.weight_decay)
                                                   .nesterov(c.nesterov));
      const auto count = static_cast<size_t>(parameter.numel());
      State state{numbers_of(parameter), Numbers(count), {}, {}, std::vector<uint16_t>(count)};
      for (int step = 1; step <= kSteps; ++step) {
        const torch::Tensor gradient = gradient_for(parameter, step, step == kSteps);
        parameter.mutable_grad() = apply_factors(gradient, c.factors).clone();
        optimizer.step();
        sgd_step(c, isa, vector_fma, numbers_of(gradient), step, state);
        const std::string what = describe(c, isa, shape, step);
        if (c.momentum != 0) {
          const auto& theirs =
              static_cast<torch::optim::SGDParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
          expect_same_bits(state.first, numbers_of(theirs.momentum_buffer()), what + " momentum_buffer");
        }
        expect_same_bits(state.parameter, numbers_of(parameter), what + " parameter");
        expect_copy_rounds_parameter(state, what);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST_F(LibtorchBits, SgdGivesTheBitsOfTorchOptim) {
  for (double decay : {0.0, 0.013}) {
    for (bool factors : {false, true}) {
      const Factors given{factors};
      compare_sgd({0.1, 0.0, 0.0, decay, false, given}, vector_fma_);
      compare_sgd({0.03, 0.9, 0.0, decay, false, given}, vector_fma_);
      compare_sgd({0.03, 0.9, 0.3, decay, false, given}, vector_fma_);
      compare_sgd({1.0, 0.71, 0.0, decay, true, given}, vector_fma_);
    }
  }
}

}  // namespace
}  // namespace trueshard::kernels
