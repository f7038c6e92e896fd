// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/reduce_elements.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "kernels/kernels.h"
#include "plugin/comm/names.h"

namespace trueshard::comm {
namespace {

constexpr int64_t kBlock = 256;     // elements of one stack entry of a product
constexpr int64_t kScratch = 4096;  // elements of the fp32 sum before its factor

class DefaultFloatState {  // round to nearest, denormals kept; the caller's state comes back at the end
 public:
#if defined(__x86_64__)
  DefaultFloatState() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatState() { _mm_setcsr(before_); }
#else
  DefaultFloatState() = default;
  ~DefaultFloatState() = default;
#endif
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;

#if defined(__x86_64__)
 private:
  unsigned before_;
#endif
};

bool is_floating(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double || dtype == c10::ScalarType::Half ||
         dtype == c10::ScalarType::BFloat16;
}
bool is_integer(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
      return true;
    default:
      return false;
  }
}

kernels::DType kernel_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return kernels::DType::kFloat64;
    case c10::ScalarType::Half:
      return kernels::DType::kFloat16;
    case c10::ScalarType::BFloat16:
      return kernels::DType::kBFloat16;
    default:
      return kernels::DType::kFloat32;
  }
}
template <class Accumulator>
constexpr kernels::DType kDTypeOf =
    std::is_same_v<Accumulator, double> ? kernels::DType::kFloat64 : kernels::DType::kFloat32;

template <class T>
T combine(Reduction reduction, T a, T b) {  // integers: all operations are associative, so the order does not matter
  using U = std::make_unsigned_t<T>;
  using Wide = std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, U>;  // no promotion to a signed type
  switch (reduction) {
    case Reduction::kSum:
      return static_cast<T>(
          static_cast<U>(static_cast<Wide>(static_cast<U>(a)) + static_cast<Wide>(static_cast<U>(b))));
    case Reduction::kProduct:
      return static_cast<T>(
          static_cast<U>(static_cast<Wide>(static_cast<U>(a)) * static_cast<Wide>(static_cast<U>(b))));
    case Reduction::kMin:
      return std::min(a, b);
    case Reduction::kMax:
      return std::max(a, b);
    case Reduction::kBand:
      return static_cast<T>(a & b);
    case Reduction::kBor:
      return static_cast<T>(a | b);
    default:
      return static_cast<T>(a ^ b);
  }
}

template <class T>
void reduce_integers(Reduction reduction, const ElementReducer::Arrays& arrays, int ranks) {
  for (int64_t i = 0; i < arrays.count; ++i) {
    T value = static_cast<const T*>(arrays.operands[0])[i];
    for (int r = 1; r < ranks; ++r) value = combine(reduction, value, static_cast<const T*>(arrays.operands[r])[i]);
    static_cast<T*>(arrays.output)[i] = value;
  }
}

void reduce_bools(Reduction reduction, const ElementReducer::Arrays& arrays, int ranks) {
  for (int64_t i = 0; i < arrays.count; ++i) {
    const auto at = [&](int r) { return static_cast<const uint8_t*>(arrays.operands[r])[i] != 0; };
    bool value = at(0);
    for (int r = 1; r < ranks; ++r) {
      if (reduction == Reduction::kSum || reduction == Reduction::kMax || reduction == Reduction::kBor) {
        value = value || at(r);
      } else if (reduction == Reduction::kBxor) {
        value = value != at(r);
      } else {
        value = value && at(r);
      }
    }
    static_cast<uint8_t*>(arrays.output)[i] = value ? 1 : 0;
  }
}

const std::byte* offset(const void* data, int64_t bytes) { return static_cast<const std::byte*>(data) + bytes; }
std::byte* offset(void* data, int64_t bytes) { return static_cast<std::byte*>(data) + bytes; }

}  // namespace

std::string reduction_refusal(const ReductionSpec& spec) {
  const Reduction reduction = spec.reduction;
  std::string what("'");
  what.append(reduction_name(static_cast<int>(reduction))).append("' of ").append(dtype_name(spec.dtype));
  const bool bitwise = reduction == Reduction::kBand || reduction == Reduction::kBor || reduction == Reduction::kBxor;
  const bool scaled = reduction == Reduction::kAvg || reduction == Reduction::kPremulSum;
  if (is_floating(spec.dtype)) {
    return bitwise ? what + " is not defined; bitwise reductions need integers or bool" : std::string();
  }
  if (is_integer(spec.dtype) || spec.dtype == c10::ScalarType::Bool) {
    return scaled ? what + " is not defined, it would have to round; use sum and divide, or a floating type"
                  : std::string();
  }
  return what + " is not supported; reduce float16, bfloat16, float32, float64, integers or bool";
}

ElementReducer::ElementReducer(int ranks)
    : ranks_(ranks), program_(plan::whole_program(std::vector<bool>(static_cast<size_t>(ranks), true))) {}

// The sum over `count` elements from element `begin` on.
void ElementReducer::sum(const SumRequest& request, const Arrays& arrays) const {
  const int64_t skip = request.begin * kernels::itemsize(request.dtype);
  std::array<kernels::Operand, 256> operands;
  for (size_t i = 0; i < program_.operands.size(); ++i) {
    operands[i] = {offset(arrays.operands[program_.operands[i].index], skip), request.dtype};
  }
  void* outputs[1] = {request.output};
  kernels::SumTreeCall call{};
  call.steps = program_.steps.data();
  call.step_count = static_cast<int>(program_.steps.size());
  call.operands = operands.data();
  call.outputs = outputs;
  call.count = request.count;
  call.accumulate_fp64 = request.dtype == kernels::DType::kFloat64;
  call.output_dtype = request.output_dtype;
  call.epilogue.divide = request.divide;
  call.epilogue.divisor = ranks_;
  kernels::kernels().sum_tree(call);
}

void ElementReducer::premul_sum(const ReductionSpec& spec, const Arrays& arrays) const {
  const kernels::DType dtype = kernel_dtype(spec.dtype);
  const kernels::DType accumulator = dtype == kernels::DType::kFloat64 ? dtype : kernels::DType::kFloat32;
  alignas(64) std::array<double, kScratch> scratch;
  for (int64_t begin = 0; begin < arrays.count; begin += kScratch) {
    const int64_t count = std::min(kScratch, arrays.count - begin);
    sum({dtype, accumulator, begin, count, scratch.data(), false}, arrays);
    kernels::kernels().scale(scratch.data(), accumulator, count, spec.factor);
    kernels::kernels().cast(scratch.data(), accumulator, offset(arrays.output, begin * kernels::itemsize(dtype)), dtype,
                            count);
  }
}

// The tree of the sum, with products at its nodes.
template <class Accumulator>
void ElementReducer::product(c10::ScalarType dtype, const Arrays& arrays) const {
  const kernels::DType type = kernel_dtype(dtype);
  const int64_t item = kernels::itemsize(type);
  constexpr int kDepth = 10;  // floor(log2 255) + 2 entries are in use at most
  std::array<std::array<Accumulator, kBlock>, kDepth> stack;
  for (int64_t begin = 0; begin < arrays.count; begin += kBlock) {
    const int64_t count = std::min(kBlock, arrays.count - begin);
    size_t depth = 0;
    for (const kernels::SumStep& step : program_.steps) {
      if (step.kind == kernels::SumStep::Kind::kLoad) {
        const void* operand = arrays.operands[program_.operands[step.index].index];
        kernels::kernels().cast(offset(operand, begin * item), type, stack[depth++].data(), kDTypeOf<Accumulator>,
                                count);
      } else if (step.kind == kernels::SumStep::Kind::kAdd) {
        --depth;
        for (int64_t i = 0; i < count; ++i)
          stack[depth - 1][static_cast<size_t>(i)] *= stack[depth][static_cast<size_t>(i)];
      } else {
        --depth;
        kernels::kernels().cast(stack[depth].data(), kDTypeOf<Accumulator>, offset(arrays.output, begin * item), type,
                                count);
      }
    }
  }
}

template <class Accumulator>
void ElementReducer::extreme(const ReductionSpec& spec, const Arrays& arrays) const {
  const kernels::DType type = kernel_dtype(spec.dtype);
  const int64_t item = kernels::itemsize(type);
  std::array<Accumulator, kBlock> best, other;
  for (int64_t begin = 0; begin < arrays.count; begin += kBlock) {
    const int64_t count = std::min(kBlock, arrays.count - begin);
    kernels::kernels().cast(offset(arrays.operands[0], begin * item), type, best.data(), kDTypeOf<Accumulator>, count);
    for (int r = 1; r < ranks_; ++r) {
      kernels::kernels().cast(offset(arrays.operands[r], begin * item), type, other.data(), kDTypeOf<Accumulator>,
                              count);
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
        const Accumulator a = best[i], b = other[i];
        const bool keep =
            a != a || (b == b && (spec.reduction == Reduction::kMin ? a <= b : a >= b));  // NaN stays and wins
        best[i] = keep ? a : b;
      }
    }
    kernels::kernels().cast(best.data(), kDTypeOf<Accumulator>, offset(arrays.output, begin * item), type, count);
  }
}

void ElementReducer::reduce(const ReductionSpec& spec, const Arrays& arrays) const {
  if (arrays.count == 0) return;
  if (is_floating(spec.dtype)) {
    const DefaultFloatState state;
    const bool fp64 = spec.dtype == c10::ScalarType::Double;
    if (spec.reduction == Reduction::kSum || spec.reduction == Reduction::kAvg) {
      const kernels::DType dtype = kernel_dtype(spec.dtype);
      return sum({dtype, dtype, 0, arrays.count, arrays.output, spec.reduction == Reduction::kAvg}, arrays);
    }
    if (spec.reduction == Reduction::kPremulSum) return premul_sum(spec, arrays);
    if (spec.reduction == Reduction::kProduct)
      return fp64 ? product<double>(spec.dtype, arrays) : product<float>(spec.dtype, arrays);
    return fp64 ? extreme<double>(spec, arrays) : extreme<float>(spec, arrays);
  }
  switch (spec.dtype) {
    case c10::ScalarType::Bool:
      return reduce_bools(spec.reduction, arrays, ranks_);
    case c10::ScalarType::Byte:
      return reduce_integers<uint8_t>(spec.reduction, arrays, ranks_);
    case c10::ScalarType::Char:
      return reduce_integers<int8_t>(spec.reduction, arrays, ranks_);
    case c10::ScalarType::Short:
      return reduce_integers<int16_t>(spec.reduction, arrays, ranks_);
    case c10::ScalarType::Int:
      return reduce_integers<int32_t>(spec.reduction, arrays, ranks_);
    case c10::ScalarType::UInt16:
      return reduce_integers<uint16_t>(spec.reduction, arrays, ranks_);
    case c10::ScalarType::UInt32:
      return reduce_integers<uint32_t>(spec.reduction, arrays, ranks_);
    case c10::ScalarType::UInt64:
      return reduce_integers<uint64_t>(spec.reduction, arrays, ranks_);
    default:
      return reduce_integers<int64_t>(spec.reduction, arrays, ranks_);
  }
}

}  // namespace trueshard::comm
