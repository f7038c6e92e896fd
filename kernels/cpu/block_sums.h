// SPDX-License-Identifier: BSD-3-Clause
// Role: the sum of one norm block (kernels.h, kBlock): a canonical tree over its 16 rows, then over the 16 lanes.
// Invariants: the tree is fixed at compile time; a row type yields row r as 16 fp64 contributions.
// Shapes: kBlock elements; short blocks are filled up with zeros by the caller. Threads: pure. Errors: none.
#pragma once
#include "kernels/cpu/isa.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {

struct SquaresOfFloats {
  const float* data;
  TRUESHARD_INLINE Doubles pair(int row) const {  // squares of fp32 numbers are exact in fp64: fusing changes no bit
    const Doubles first = widen(data + row * kRow);
    return add_exact_square(widen(data + (row + 1) * kRow), multiply(first, first));
  }
};

template <class Row>
struct PlainPairs {  // pair() from row()
  TRUESHARD_INLINE Doubles pair(int row) const {
    const Row& self = static_cast<const Row&>(*this);
    return add(self.row(row), self.row(row + 1));
  }
};
struct ScaledSquaresOfFloats : PlainPairs<ScaledSquaresOfFloats> {
  const float* data;
  double scale;
  TRUESHARD_INLINE Doubles row(int r) const {
    const Doubles x = multiply(widen(data + r * kRow), splat_f64(scale));
    return multiply(x, x);
  }
};
struct ScaledSquaresOfDoubles : PlainPairs<ScaledSquaresOfDoubles> {
  const double* data;
  double scale;
  TRUESHARD_INLINE Doubles row(int r) const {
    const Doubles x = multiply(load_f64(data + r * kRow), splat_f64(scale));
    return multiply(x, x);
  }
};
struct MagnitudesOfFloats : PlainPairs<MagnitudesOfFloats> {
  const float* data;
  TRUESHARD_INLINE Doubles row(int r) const { return magnitude(widen(data + r * kRow)); }
};
struct MagnitudesOfDoubles : PlainPairs<MagnitudesOfDoubles> {
  const double* data;
  TRUESHARD_INLINE Doubles row(int r) const { return magnitude(load_f64(data + r * kRow)); }
};

template <int kFirst, int kRows, class Row>
TRUESHARD_INLINE Doubles sum_rows(const Row& rows) {
  if constexpr (kRows == 2) {
    return rows.pair(kFirst);
  } else {
    return add(sum_rows<kFirst, kRows / 2>(rows), sum_rows<kFirst + kRows / 2, kRows / 2>(rows));
  }
}

template <class Row>
TRUESHARD_INLINE double block_sum(const Row& rows) {
  static_assert(kBlock == 16 * kRow);
  return sum_lanes(sum_rows<0, 16>(rows));
}

TRUESHARD_INLINE double block_square_sum(const float* block) { return block_sum(SquaresOfFloats{block}); }
TRUESHARD_INLINE double block_square_sum(const double* block) {
  return block_sum(ScaledSquaresOfDoubles{{}, block, 1.0});
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
