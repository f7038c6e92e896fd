// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/optim/fused_step.h"

#include <ATen/Functions.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Logging.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/parallel.h"

namespace trueshard::optim {

namespace {

// libtorch's own square root: its vector math library is not always correctly rounded.
void torch_sqrt(float* data, int64_t count) {
  const at::NoGradGuard no_grad;
  at::from_blob(data, {count}, at::TensorOptions().dtype(c10::kFloat)).sqrt_();
}

bool vector_fma() { return at::get_cpu_capability() != "DEFAULT"; }

// One shard with everything a kernel needs; the kernels see 1-D memory only.
struct Shard {
  float* parameter;
  const float* gradient;
  int64_t count;
  kernels::ParameterCopy copy;
  kernels::GradientFactors factors;
};

template <typename State, typename Options>
kernels::AdamCall adam_call(const Options& options, State& state, const Shard& shard, bool decoupled) {
  kernels::AdamCall call{};
  call.count = shard.count;
  call.parameter = shard.parameter;
  call.gradient = shard.gradient;
  call.exp_avg = state.exp_avg().template data_ptr<float>();
  call.exp_avg_sq = state.exp_avg_sq().template data_ptr<float>();
  call.max_exp_avg_sq = options.amsgrad() ? state.max_exp_avg_sq().template data_ptr<float>() : nullptr;
  call.copy = shard.copy;
  call.factors = shard.factors;
  call.decoupled = decoupled;
  call.lr = options.lr();
  call.beta1 = std::get<0>(options.betas());
  call.beta2 = std::get<1>(options.betas());
  call.eps = options.eps();
  call.weight_decay = options.weight_decay();
  call.step = state.step();
  call.sqrt = torch_sqrt;
  call.vector_fma = vector_fma();
  return call;
}

template <typename Call>
Call at_offset(Call call, int64_t begin, int64_t end) {
  call.count = end - begin;
  call.parameter += begin;
  call.gradient += begin;
  if (call.copy.data) call.copy.data = static_cast<std::byte*>(call.copy.data) + begin * 2;
  return call;
}
kernels::AdamCall part(const kernels::AdamCall& whole, int64_t begin, int64_t end) {
  auto call = at_offset(whole, begin, end);
  call.exp_avg += begin;
  call.exp_avg_sq += begin;
  if (call.max_exp_avg_sq) call.max_exp_avg_sq += begin;
  return call;
}
kernels::SgdCall part(const kernels::SgdCall& whole, int64_t begin, int64_t end) {
  auto call = at_offset(whole, begin, end);
  if (call.momentum_buffer) call.momentum_buffer += begin;
  return call;
}

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

template <typename State, typename Options>
void step_adam(StateMap& states, const Options& options, const at::Tensor& key, const Shard& shard, bool decoupled) {
  auto& slot = states[key.unsafeGetTensorImpl()];
  if (!slot) {
    auto fresh = std::make_unique<State>();
    fresh->step(0);
    fresh->exp_avg(at::zeros_like(key, c10::MemoryFormat::Preserve).detach());
    fresh->exp_avg_sq(at::zeros_like(key, c10::MemoryFormat::Preserve).detach());
    if (options.amsgrad()) fresh->max_exp_avg_sq(at::zeros_like(key, c10::MemoryFormat::Preserve).detach());
    slot = std::move(fresh);
  }
  auto& state = static_cast<State&>(*slot);
  state.step(state.step() + 1);
  if (shard.count == 0) return;
  const auto call = adam_call(options, state, shard, decoupled);
  engine::for_blocks(shard.count, [&](int64_t begin, int64_t end) { kernels::kernels().adam(part(call, begin, end)); });
}

void step_sgd(StateMap& states, const torch::optim::SGDOptions& options, const at::Tensor& key, const Shard& shard) {
  kernels::SgdCall call{};
  call.count = shard.count;
  call.parameter = shard.parameter;
  call.gradient = shard.gradient;
  call.copy = shard.copy;
  call.factors = shard.factors;
  call.lr = options.lr();
  call.momentum = options.momentum();
  call.dampening = options.dampening();
  call.weight_decay = options.weight_decay();
  call.nesterov = options.nesterov();
  call.vector_fma = vector_fma();
  if (options.momentum() != 0) {
    auto& slot = states[key.unsafeGetTensorImpl()];
    call.first_step = !slot || !static_cast<torch::optim::SGDParamState&>(*slot).momentum_buffer().defined();
    if (call.first_step) {
      auto fresh = std::make_unique<torch::optim::SGDParamState>();
      fresh->momentum_buffer(at::empty_like(key, c10::MemoryFormat::Preserve).detach());
      slot = std::move(fresh);
    }
    auto buffer = static_cast<torch::optim::SGDParamState&>(*slot).momentum_buffer();
    call.momentum_buffer = shard.count > 0 ? buffer.data_ptr<float>() : nullptr;
  }
  if (shard.count == 0) return;
  engine::for_blocks(shard.count, [&](int64_t begin, int64_t end) { kernels::kernels().sgd(part(call, begin, end)); });
}

void step_one(Kind kind, StateMap& states, const torch::optim::OptimizerOptions& options, const at::Tensor& key,
              const Shard& shard) {
  switch (kind) {
    case Kind::kAdam:
      return step_adam<torch::optim::AdamParamState>(states, static_cast<const torch::optim::AdamOptions&>(options),
                                                     key, shard, false);
    case Kind::kAdamW:
      return step_adam<torch::optim::AdamWParamState>(states, static_cast<const torch::optim::AdamWOptions&>(options),
                                                      key, shard, true);
    case Kind::kSgd:
      return step_sgd(states, static_cast<const torch::optim::SGDOptions&>(options), key, shard);
    default:
      TORCH_INTERNAL_ASSERT(false);
  }
}

// ---- the probe -----------------------------------------------------------------------------------------------------

template <typename Optimizer, typename Options>
bool probe(Kind kind, const std::vector<Options>& variants) {
  constexpr int64_t kCount = 1031;  // vector bodies and a ragged tail
  for (const auto& options : variants) {
    // A fixed pattern over many binades, no random numbers: the user's generators are left alone.
    auto values = at::arange(kCount, at::kFloat).mul_(0.7315f).sin_();
    auto theirs = values.clone().set_requires_grad(true);
    auto ours = values.clone();
    Optimizer optimizer({theirs}, options);
    StateMap states;
    for (int step = 0; step < 4; ++step) {
      auto gradient = at::arange(kCount, at::kFloat).mul_(0.37f + 0.11f * static_cast<float>(step)).cos_();
      gradient.mul_(at::arange(kCount, at::kFloat).remainder_(40).sub_(28).exp2_());
      theirs.mutable_grad() = gradient.clone();
      optimizer.step();
      step_one(kind, states, options, ours, {ours.data_ptr<float>(), gradient.const_data_ptr<float>(), kCount, {}, {}});
    }
    if (std::memcmp(ours.const_data_ptr(), theirs.const_data_ptr(), kCount * sizeof(float)) != 0) return false;
  }
  return true;
}

bool run_probe(Kind kind) {
  const at::NoGradGuard no_grad;
  using torch::optim::AdamOptions;
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  switch (kind) {
    case Kind::kAdam:
      return probe<torch::optim::Adam, AdamOptions>(
          kind, {AdamOptions(1e-2), AdamOptions(3e-4).weight_decay(0.1), AdamOptions(1e-3).amsgrad(true)});
    case Kind::kAdamW:
      return probe<torch::optim::AdamW, AdamWOptions>(
          kind, {AdamWOptions(1e-2), AdamWOptions(3e-4).weight_decay(0), AdamWOptions(1e-3).amsgrad(true)});
    case Kind::kSgd:
      return probe<torch::optim::SGD, SGDOptions>(
          kind, {SGDOptions(0.1), SGDOptions(0.1).momentum(0.9).weight_decay(1e-4),
                 SGDOptions(0.1).momentum(0.9).dampening(0.1), SGDOptions(0.1).momentum(0.9).nesterov(true)});
    default:
      return false;
  }
}

}  // namespace

bool fused_step_matches(Kind kind) {
  if (kind != Kind::kAdam && kind != Kind::kAdamW && kind != Kind::kSgd) return false;
  static std::mutex mutex;
  static std::map<Kind, bool> results;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = results.find(kind);
  if (found != results.end()) return found->second;
  const bool matches = run_probe(kind);
  if (!matches) {
    LOG(WARNING) << "trueshard: the fused optimizer step does not give this libtorch's bits ("
                 << at::get_cpu_capability() << "); libtorch's own step is called instead, which is slower";
  }
  return results[kind] = matches;
}

bool fused_step(const FusedStepCall& call) {
  if (!fused_step_matches(call.kind) || !call.reducer.gradients_are_ours()) return false;
  for (const auto& group : call.members) {
    for (const auto p : group) {  // fp64 parameters and 16-bit masters are libtorch's
      if (call.model.parameters()[p].master_dtype != c10::kFloat || call.model.parameters()[p].low_precision_master)
        return false;
    }
  }
  const at::NoGradGuard no_grad;
  for (size_t g = 0; g < call.members.size(); ++g) {
    const auto& options = call.optimizer.param_groups()[g].options();
    for (const auto p : call.members[g]) {
      if (!call.reducer.has_gradient(p)) continue;
      const auto& parameter = call.model.parameters()[p];
      const auto range = call.model.owned(p, call.model.rank());
      Shard shard{reinterpret_cast<float*>(call.model.master(p, call.model.rank())),
                  reinterpret_cast<const float*>(call.model.gradient(p)),
                  range.empty() ? 0 : range.size(),
                  {},
                  call.factors};
      if (parameter.separate_master && call.model.keeps_compute_copies() && shard.count > 0) {
        shard.copy = {call.model.compute(p, call.model.rank()) + range.begin * 2,
                      engine::kernel_dtype(parameter.compute_dtype)};
      }
      step_one(call.kind, call.optimizer.state(), options, call.reducer.shard(p), shard);
    }
  }
  return true;
}

}  // namespace trueshard::optim
