// SPDX-License-Identifier: BSD-3-Clause
// Role: programs that are the whole canonical tree over a few leaves of one dtype run row by row in registers.
// Invariants: all operands of a row are read before its output is written. The bits are those of the machine.
// Shapes: any count; a short last row goes through local arrays. Threads: pure. Errors: none.
#pragma once
#include "kernels/cpu/sum_tree_finish.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
constexpr int kMaxWholeLeaves = 8;

// A program that is the canonical tree over a few leaves of one dtype, stored to outputs[0].
struct WholeTree {
  int leaf_count = 0;  // 0: the program is something else
  DType dtype = DType::kFloat32;
  const void* leaves[kMaxWholeLeaves];
};

// The canonical tree in program order: after each load, equal subtrees are added; the rest at the end, smallest first.
inline WholeTree match_whole_tree(const SumTreeCall& call) {
  WholeTree tree;
  if (call.accumulate_fp64) return tree;
  int leaves = 0, pending = 0, s = 0;
  for (; s < call.step_count && call.steps[s].kind == SumStep::Kind::kLoad; ++leaves) {
    const Operand& operand = call.operands[call.steps[s++].index];
    if (leaves == kMaxWholeLeaves || (leaves > 0 && operand.dtype != tree.dtype)) return tree;
    tree.dtype = operand.dtype;
    tree.leaves[leaves] = operand.data;
    ++pending;
    for (int merged = leaves + 1; merged % 2 == 0; merged /= 2, --pending) {
      if (s == call.step_count || call.steps[s++].kind != SumStep::Kind::kAdd) return tree;
    }
  }
  for (; pending > 1; --pending) {
    if (s == call.step_count || call.steps[s++].kind != SumStep::Kind::kAdd) return tree;
  }
  const bool ends = leaves > 0 && s + 1 == call.step_count && call.steps[s].kind == SumStep::Kind::kStore;
  if (ends && call.steps[s].index == 0) tree.leaf_count = leaves;
  return tree;
}

template <class In, int kFirst, int kCount>
TRUESHARD_INLINE Floats tree_row(const void* const* leaves, int64_t i) {
  if constexpr (kCount == 1) {
    return In::load(static_cast<const typename In::Element*>(leaves[kFirst]) + i);
  } else {
    constexpr int kSplit = kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    return add(tree_row<In, kFirst, kSplit>(leaves, i), tree_row<In, kFirst + kSplit, kCount - kSplit>(leaves, i));
  }
}

// The processor's own streams stop at every page and do not know the outputs; asking kAhead elements early, beyond the
// end too (which is harmless), took 6 to 12 % off sums of 25 MB leaves (bench/kernels_bench.cpp).
constexpr int64_t kAhead = 512;
template <class In, int kCount, class Out>
TRUESHARD_INLINE void prefetch_row(const void* const* leaves, void* output, int64_t i) {
  for (int leaf = 0; leaf < kCount; ++leaf) {
    __builtin_prefetch(static_cast<const typename In::Element*>(leaves[leaf]) + i + kAhead);
  }
  __builtin_prefetch(static_cast<typename Out::Element*>(output) + i + kAhead, 1);
}

// One row of the tree that ends before kRow elements, zeros beyond.
template <class In, int kCount>
TRUESHARD_INLINE Floats tree_part(const void* const* leaves, int64_t i, int64_t part) {
  alignas(64) typename In::Element rows[kCount][kRow] = {};
  const void* copies[kCount];
  for (int leaf = 0; leaf < kCount; ++leaf) {
    copies[leaf] = rows[leaf];
    const auto* source = static_cast<const typename In::Element*>(leaves[leaf]) + i;
    for (int64_t k = 0; k < part; ++k) rows[leaf][k] = source[k];
  }
  return tree_row<In, 0, kCount>(copies, 0);
}

// Nothing but the sum and the division is asked for: everything stays in registers.
template <class In, int kCount, class Out>
inline void plain_tree(const void* const* leaves, const Finish<float>& finish, int64_t count) {
  auto* output = static_cast<typename Out::Element*>(finish.output);
  const Division<float> division = finish.division;
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) {
    prefetch_row<In, kCount, Out>(leaves, finish.output, i);
    Out::store(output + i, apply(division, tree_row<In, 0, kCount>(leaves, i)));
  }
  if (i < count) store_part<Out>(output + i, count - i, apply(division, tree_part<In, kCount>(leaves, i, count - i)));
}

// Rows of the tree that go out finished and give their squares on the way: the arithmetic of the squares then runs
// while the next rows come from memory, which a second loop over the block would not allow.
template <class In, int kCount>
struct SquaresOfFinishedRows {
  const void* const* leaves;
  const Finish<float>& finish;
  int64_t begin;
  float* block;
  TRUESHARD_INLINE Doubles row(int r) const {
    const int64_t i = begin + r * kRow;
    prefetch_row<In, kCount, Float32>(leaves, finish.output, i);
    store_f32(block + r * kRow, finish_row<Float32>(finish, tree_row<In, 0, kCount>(leaves, i), i, kRow));
    return widen(block + r * kRow);
  }
  TRUESHARD_INLINE Doubles pair(int r) const {
    const Doubles first = row(r);
    return add_exact_square(row(r + 1), multiply(first, first));
  }
};

template <class In, int kCount>
TRUESHARD_INLINE void squared_block(const void* const* leaves, const Finish<float>& finish, int64_t begin) {
  alignas(64) float rows[4 * kRow];
  Doubles quarters[4];
  for (int q = 0; q < 4; ++q) {
    const SquaresOfFinishedRows<In, kCount> source{leaves, finish, begin + q * 4 * kRow, rows};
    quarters[q] = sum_rows<0, 4>(source);
  }
  store_square_sum(finish, begin, sum_lanes(add(add(quarters[0], quarters[1]), add(quarters[2], quarters[3]))));
}

// Squares are fused for the fp32 shard, which is what asks for them.
template <class In, int kCount>
inline void checked_tree(const void* const* leaves, const Finish<float>& finish, int64_t count) {
  const bool fused = finish.square_sums != nullptr && finish.output_dtype == DType::kFloat32;
  alignas(64) float block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    if (fused && size == kBlock) {
      squared_block<In, kCount>(leaves, finish, begin);
      continue;
    }
    int64_t i = 0;
    for (; i + kRow <= size; i += kRow) store_f32(block + i, tree_row<In, 0, kCount>(leaves, begin + i));
    if (i < size) store_f32(block + i, tree_part<In, kCount>(leaves, begin + i, size - i));
    finish_block(finish, block, begin, size);
  }
}

template <class In, int kCount>
inline void whole_tree(const void* const* leaves, const Finish<float>& finish, int64_t count) {
  if (finish.base != nullptr || finish.nonfinite != nullptr || finish.square_sums != nullptr) {
    return checked_tree<In, kCount>(leaves, finish, count);
  }
  switch (finish.output_dtype) {
    case DType::kBFloat16:
      return plain_tree<In, kCount, BFloat16>(leaves, finish, count);
    case DType::kFloat16:
      return plain_tree<In, kCount, Float16>(leaves, finish, count);
    case DType::kFloat32:
    case DType::kFloat64:
      return plain_tree<In, kCount, Float32>(leaves, finish, count);
  }
}

template <class In>
inline bool run_whole_tree(const WholeTree& tree, const Finish<float>& finish, int64_t count) {
  switch (tree.leaf_count) {
    case 1:
      whole_tree<In, 1>(tree.leaves, finish, count);
      return true;
    case 2:
      whole_tree<In, 2>(tree.leaves, finish, count);
      return true;
    case 3:
      whole_tree<In, 3>(tree.leaves, finish, count);
      return true;
    case 4:
      whole_tree<In, 4>(tree.leaves, finish, count);
      return true;
    case 8:
      whole_tree<In, 8>(tree.leaves, finish, count);
      return true;
    default:
      return false;
  }
}

inline bool run_whole_tree(const WholeTree& tree, const Finish<float>& finish, int64_t count) {
  switch (tree.dtype) {
    case DType::kFloat32:
      return run_whole_tree<Float32>(tree, finish, count);
    case DType::kBFloat16:
      return run_whole_tree<BFloat16>(tree, finish, count);
    case DType::kFloat16:
      return run_whole_tree<Float16>(tree, finish, count);
    case DType::kFloat64:
      return false;
  }
  return false;
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
