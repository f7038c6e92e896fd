// SPDX-License-Identifier: BSD-3-Clause
// Role: the canonical tree of one bucket on one rank: a binary counter of partial shards that backward passes push
// leaves onto. Invariants: I1 the first partial sum lives in the gradient memory itself, unless a gradient from before
// is kept there (base).
//             I2 buffers beyond that exist only between the passes of one step. I3 finish() leaves the reduced gradient
//             of this rank's piece in gradient memory, and records what the norm and the finite check need, in the same
//             pass over memory.
// Threads: one at a time. Errors: none of its own.
#pragma once
#include <vector>

#include "plugin/engine/sharded_model.h"
#include "plugin/plan/sum_tree_plan.h"

namespace trueshard::engine {

// What finish() learns about the gradients on its way: sums of squares per norm block and whether anything is not
// finite.
struct GradientRecord {
  bool valid = false;                              // describes what is in gradient memory now
  bool nonfinite = false;                          // of this rank's pieces
  std::vector<std::vector<double>> block_squares;  // per run of NormPlan::runs(rank)
  std::vector<std::vector<double>> cut_elements;   // per piece of NormPlan::cuts(rank)
};

class PartialSums {
 public:
  PartialSums(ShardedModel& model, int64_t bucket);
  // leaf(rank, placement index) of the pass, in leaf order of ranks; data points at the whole parameter, null when
  // absent.
  struct Leaf {
    const std::byte* data = nullptr;
    c10::ScalarType dtype = c10::kFloat;
  };
  // Adds the W leaves of one pass. `leaves[rank][i]`: leaf of placement i.
  void push(const std::vector<std::vector<Leaf>>& leaves);
  void finish(double divisor, GradientRecord& record);
  // Forgets all partial sums (gradients were zeroed). keep: nothing stays in gradient memory as base either.
  void clear();
  void drop(int64_t placement);  // one parameter was zeroed
  void set_base(int64_t placement, bool there) { base_[placement] = there; }
  bool base(int64_t placement) const { return base_[placement]; }
  bool any_base() const;
  bool has_sum(int64_t placement) const;  // some leaf since the tree began
  uint64_t leaves() const { return leaves_; }
  int64_t extra_bytes() const;

 private:
  std::byte* slot_data(int slot, int64_t placement, const std::vector<int>& slots) const;
  void reserve_buffers(size_t count);
  void run(const plan::SumProgram& program, int64_t placement, const std::vector<int>& before,
           const std::vector<int>& after, const std::vector<std::vector<Leaf>>& leaves) const;
  void finish_parameter(int64_t placement, double divisor, GradientRecord& record);
  void record_cuts(int64_t placement, const std::byte* gradient, GradientRecord& record) const;

  ShardedModel& model_;
  const plan::BucketPlan& bucket_;
  uint64_t leaves_ = 0;
  bool keep_base_ = false;                       // gradient memory holds bases while this tree grows
  std::vector<std::vector<bool>> slot_present_;  // [placement][slot]
  std::vector<bool> base_;                       // [placement]
  std::vector<at::Tensor> extra_;                // partial shards beyond gradient memory, S elements each
  std::vector<int64_t> run_of_;                  // [placement] -> index into norm_plan.runs(rank), -1
};

}  // namespace trueshard::engine
