// SPDX-License-Identifier: BSD-3-Clause
// Role: the canonical tree twice: as a program for sum_tree, and as the recursive definition that it must obey.
// Invariants: written from docs/numerics.md section 1, independent of plugin/plan. Shapes: leaves of equal count.
// Threads: none. Errors: none.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "tests/kernels/kernel_data.h"

namespace trueshard::kernels::test {

inline int split_of(int count) {
  int split = 1;
  while (split * 2 < count) split *= 2;
  return split;
}

// Appends the steps that leave T(first, first + count) on the stack; false when all its leaves are absent.
inline bool append_tree(const std::vector<bool>& present, int first, int count, std::vector<SumStep>& steps) {
  if (count == 1) {
    if (present[static_cast<size_t>(first)]) steps.push_back({SumStep::Kind::kLoad, static_cast<uint8_t>(first)});
    return present[static_cast<size_t>(first)];
  }
  const int split = split_of(count);
  const bool left = append_tree(present, first, split, steps);
  const bool right = append_tree(present, first + split, count - split, steps);
  if (left && right) steps.push_back({SumStep::Kind::kAdd, 0});
  return left || right;
}

inline std::vector<SumStep> tree_program(const std::vector<bool>& present) {
  std::vector<SumStep> steps;
  if (append_tree(present, 0, static_cast<int>(present.size()), steps)) steps.push_back({SumStep::Kind::kStore, 0});
  return steps;
}

// T over element i of the leaves, in fp32 or fp64; nothing when all are absent.
template <typename Number>
std::optional<Number> tree_value(const std::vector<Array>& leaves, const std::vector<bool>& present, int64_t i,
                                 int first, int count) {
  if (count == 1) {
    if (!present[static_cast<size_t>(first)]) return std::nullopt;
    return static_cast<Number>(leaves[static_cast<size_t>(first)].value(i));
  }
  const int split = split_of(count);
  const auto left = tree_value<Number>(leaves, present, i, first, split);
  const auto right = tree_value<Number>(leaves, present, i, first + split, count - split);
  if (!left) return right;
  if (!right) return left;
  return *left + *right;
}

// A call over whole arrays; the vectors live as long as the object.
struct SumCase {
  std::vector<SumStep> steps;
  std::vector<Operand> operands;
  std::vector<void*> outputs;
  int64_t count = 0;
  bool accumulate_fp64 = false;
  DType output_dtype = DType::kFloat32;
  SumEpilogue epilogue;

  void add_operands(const std::vector<Array>& leaves) {
    for (const Array& leaf : leaves) operands.push_back({leaf.data(), leaf.dtype()});
    count = leaves.front().count();
  }
  void run(Isa isa) const {
    kernels(isa).sum_tree({steps.data(), static_cast<int>(steps.size()), operands.data(), outputs.data(), count,
                           accumulate_fp64, output_dtype, epilogue});
  }
};

}  // namespace trueshard::kernels::test
