// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/optimizer_rows.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

// The square roots are the caller's (libtorch's), which cost a call: large enough to hide it, small enough to stay
// in the cache.
constexpr int64_t kChunk = 8192;

template <bool kFused>
TRUESHARD_INLINE void moments_row(const AdamCall& call, const AdamScalars& s, int64_t i, int64_t part, float* root) {
  Floats gradient = load_gradient(call.gradient + i, part, call.factors);
  if (s.l2) gradient = add_scaled<kFused>(gradient, load_row(call.parameter + i, part), splat(s.weight_decay));
  const Floats first = multiply(load_row(call.exp_avg + i, part), splat(s.beta1));
  store_row(call.exp_avg + i, part, add_scaled<kFused>(first, gradient, splat(s.one_minus_beta1)));
  const Floats faded = multiply(load_row(call.exp_avg_sq + i, part), splat(s.beta2));
  Floats second = add_scaled<kFused>(faded, gradient, multiply(splat(s.one_minus_beta2), gradient));
  store_row(call.exp_avg_sq + i, part, second);
  if (call.max_exp_avg_sq != nullptr) {
    second = maximum(second, load_row(call.max_exp_avg_sq + i, part));
    store_row(call.max_exp_avg_sq + i, part, second);
  }
  store_f32(root, second);
}

TRUESHARD_INLINE void update_row(const AdamCall& call, const AdamScalars& s, int64_t i, int64_t part,
                                 const float* root) {
  const Floats denominator = add(divide(load_f32(root), splat(s.root_correction)), splat(s.eps));
  Floats parameter = load_row(call.parameter + i, part);
  if (s.decouple) parameter = multiply(parameter, splat(s.keep));
  const Floats step = multiply(splat(s.minus_step_size), load_row(call.exp_avg + i, part));
  parameter = add(parameter, divide(step, denominator));
  store_row(call.parameter + i, part, parameter);
  write_copy(call.copy, i, part, parameter);
}

template <bool kFused>
void adam_chunks(const AdamCall& call) {
  const AdamScalars s = adam_scalars(call);
  alignas(64) float roots[kChunk];
  for (int64_t begin = 0; begin < call.count; begin += kChunk) {
    const int64_t end = call.count - begin < kChunk ? call.count : begin + kChunk;
    each_row(
        begin, end, [&](int64_t i, int64_t part) __attribute__((always_inline)) {
          moments_row<kFused>(call, s, i, part, roots + (i - begin));
        });
    call.sqrt(roots, end - begin);
    each_row(
        begin, end, [&](int64_t i, int64_t part) __attribute__((always_inline)) {
          update_row(call, s, i, part, roots + (i - begin));
        });
  }
}

}  // namespace

void adam(const AdamCall& call) {
  if (call.vector_fma) {
    adam_chunks<true>(call);
  } else {
    adam_chunks<false>(call);
  }
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
