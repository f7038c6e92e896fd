// SPDX-License-Identifier: BSD-3-Clause
// Role: the arithmetic of the c10d reductions over one array per rank. Floating sums are the library's sum_tree
// kernels. Invariants: I1 docs/numerics.md section 1: one tree over the ranks, fp32 for 16-bit types, divisor or factor
// applied once, one rounding at the end. I2 integers wrap; bool is "or" for sum and max, "and" for product and min. I3
// min and max give NaN if any rank has one. I4 the default MXCSR holds inside and the caller's is restored. Shapes:
// dense 1-D arrays of `count` elements; `output` may be one of the operands exactly. Threads: pure functions. Errors:
// none; ask reduction_refusal() first.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "kernels/kernels.h"
#include "plugin/plan/sum_tree_plan.h"

namespace trueshard::comm {

enum class Reduction : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum
};  // c10d::ReduceOp's order

struct ReductionSpec {
  Reduction reduction = Reduction::kSum;
  c10::ScalarType dtype = c10::ScalarType::Float;
  double factor = 1.0;  // kPremulSum: multiplies the sum once
};

// Why this reduction cannot be done on this type, or nothing.
std::string reduction_refusal(const ReductionSpec& spec);

// Reduces over `ranks` operands. The programs are made once per number of ranks.
class ElementReducer {
 public:
  explicit ElementReducer(int ranks);
  struct Arrays {
    const void* const* operands;  // one per rank
    void* output;
    int64_t count;
  };
  void reduce(const ReductionSpec& spec, const Arrays& arrays) const;

 private:
  struct SumRequest {
    kernels::DType dtype, output_dtype;
    int64_t begin, count;
    void* output;
    bool divide;
  };
  void sum(const SumRequest& request, const Arrays& arrays) const;
  void premul_sum(const ReductionSpec& spec, const Arrays& arrays) const;
  template <class Accumulator>
  void product(c10::ScalarType dtype, const Arrays& arrays) const;
  template <class Accumulator>
  void extreme(const ReductionSpec& spec, const Arrays& arrays) const;

  int ranks_;
  plan::SumProgram program_;
};

}  // namespace trueshard::comm
