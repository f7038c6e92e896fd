// SPDX-License-Identifier: BSD-3-Clause
// Role: every loop over elements that the library runs on CPU, as one table of functions per instruction set.
// Invariants: I1 the bits of every result are the same for all tables (docs/numerics.md; reference/ is the definition).
//             I2 no function allocates, throws or reads outside [0, count) of its operands.
//             I3 every function runs under the default MXCSR (to nearest, no flush to zero) and restores the caller's.
// Shapes: all operands are dense 1-D arrays; `count` is elements. Operands may be misaligned (slow, not wrong).
// Threads: all functions are pure and may run concurrently on disjoint outputs; callers split work themselves.
// Errors: the kernels have none: callers pass valid arguments, the engine validates. Choosing a table that this
//         processor does not have, or that TRUESHARD_ISA misspells, is std::invalid_argument.
#pragma once
#include <cstdint>
#include <vector>

namespace trueshard::kernels {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
constexpr int64_t itemsize(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// ---- sum_tree ------------------------------------------------------------------------------------------------------
// One element-wise straight-line program over a small stack. The plan compiles the canonical tree (numerics.md section
// 1) to it (plugin/plan/sum_tree_plan.h); absent leaves are simply not in the program.
struct SumStep {
  enum class Kind : uint8_t {
    kLoad,   // push operands[index], converted exactly to the accumulation type
    kAdd,    // b = pop, a = pop, push a + b (one IEEE add)
    kStore,  // outputs[index] = pop
  };
  Kind kind;
  uint8_t index;
};
constexpr int kMaxSumStack = 72;  // deepest stack of a valid program: floor(log2 n) + 2

struct Operand {
  const void* data;
  DType dtype;
};

// The last steps of a reduction, applied to outputs[0] only. Order of roundings: sum; division; base + value.
struct SumEpilogue {
  bool divide = false;            // value = value / divisor, one true division
  double divisor = 1.0;           // already rounded to fp32 by the caller for fp32 accumulation
  const void* base = nullptr;     // accumulation type, or null: value = base + value
  uint8_t* nonfinite = nullptr;   // set to 1 (never cleared) when a value is inf or NaN, before the last rounding
  double* square_sums = nullptr;  // block sums of value^2 as norm_blocks(kSquare) writes them, (count + 255) / 256
};

struct SumTreeCall {
  const SumStep* steps;
  int step_count;
  const Operand* operands;
  void* const* outputs;  // accumulation type, except outputs[0], which has output_dtype; may alias operands exactly
  int64_t count;
  bool accumulate_fp64;  // fp64 operands (all of them): sums in fp64; else fp32
  DType output_dtype;    // of outputs[0]: the accumulation type, or a 16-bit type (one rounding, nearest even)
  SumEpilogue epilogue;
};

// ---- norm ----------------------------------------------------------------------------------------------------------
// A block is kBlock consecutive elements of a parameter, 16 rows of 16 fixed lanes: rows add up lane by lane in the
// canonical tree over rows, then the 16 lanes in the canonical tree. Missing elements of a short last block are +0.
constexpr int64_t kBlock = 256;
enum class NormKind : uint8_t {
  kSquare,    // sum of x * x in fp64
  kAbsolute,  // sum of |x| in fp64
  kMaximum,   // max of |x|, NaN if any is NaN
  kPower,     // sum of pow(|x| * power_scale, power) in fp64 (libm pow: same bits on one build and CPU type only)
};
struct NormCall {
  NormKind kind;
  const void* data;  // fp32 or fp64
  DType dtype;
  int64_t count;
  double* block_values;  // (count + kBlock - 1) / kBlock numbers
  double scale = 1.0;    // kSquare and kPower: x is multiplied by it in fp64 first (1 for fp32; power of two for fp64)
  double power = 0.0;
};

// ---- fused optimizer steps -----------------------------------------------------------------------------------------
// Bit-equal to libtorch's own CPU optimizers (numerics.md section 5). Scalars arrive as torch::optim holds them and are
// rounded where libtorch rounds them.
// Before use the gradient is multiplied, each product rounded to fp32: g = g * inverse_scale (if unscale), then
// g = g * clip_coefficient (if clip).
struct GradientFactors {
  bool unscale = false;
  float inverse_scale = 1.0f;
  bool clip = false;
  float clip_coefficient = 1.0f;
};
struct ParameterCopy {   // the compute copy written in the same pass: nearest even of the new parameter
  void* data = nullptr;  // null: none
  DType dtype = DType::kBFloat16;
};
using SqrtFunction = void (*)(float* data, int64_t count);  // libtorch's own sqrt, in place

struct AdamCall {  // torch::optim::Adam (decoupled = false) and AdamW (decoupled = true)
  int64_t count;
  float* parameter;
  const float* gradient;  // read only
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null: no amsgrad
  ParameterCopy copy;
  GradientFactors factors;
  bool decoupled;
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;  // already advanced: 1 for the first step
  SqrtFunction sqrt;
  bool vector_fma;  // libtorch runs its AVX2/AVX-512 kernels (which fuse some multiply-adds), not the default ones
};
struct SgdCall {  // torch::optim::SGD
  int64_t count;
  float* parameter;
  const float* gradient;
  float* momentum_buffer;  // null when momentum == 0
  bool first_step;         // no buffer existed: buffer = gradient
  ParameterCopy copy;
  GradientFactors factors;
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  bool vector_fma;
};

// ---- the table -----------------------------------------------------------------------------------------------------
enum class Isa : uint8_t { kReference = 0, kScalar = 1, kAvx2 = 2, kAvx512 = 3 };
const char* name(Isa isa);

struct Kernels {
  Isa isa;
  void (*sum_tree)(const SumTreeCall&);
  // out[i] = in[i] converted; narrowing is round to nearest even, NaN stays (quiet) NaN, denormals are kept. No overlap
  // unless in == out and the item sizes are equal.
  void (*cast)(const void* in, DType in_dtype, void* out, DType out_dtype, int64_t count);
  // data[i] *= inverse_scale (fp32; fp64 data use the double); sets *nonfinite to 1 when an input is inf or NaN.
  void (*unscale_and_check)(void* data, DType dtype, int64_t count, double inverse_scale, uint8_t* nonfinite);
  // data[i] *= factor, one rounding in the data's own dtype (16-bit: computed in fp32).
  void (*scale)(void* data, DType dtype, int64_t count, double factor);
  void (*norm_blocks)(const NormCall&);
  void (*adam)(const AdamCall&);
  void (*sgd)(const SgdCall&);
};

// The tables this processor can run, slowest first; kReference is always the first.
std::vector<Isa> available_isas();
const Kernels& kernels(Isa isa);
// The fastest table, or the one named by TRUESHARD_ISA (reference, scalar, avx2, avx512) at first use.
const Kernels& kernels();

}  // namespace trueshard::kernels
