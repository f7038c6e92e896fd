// SPDX-License-Identifier: BSD-3-Clause
// Role: one norm over sharded gradients with the same bits for every world size, stage and bucket size.
// A parameter's elements form blocks of kernels::kBlock by their own index; block values are added in the canonical
// tree over blocks, parameters in the canonical tree over parameters. A rank sends, for every run of complete blocks it
// owns, the roots of the maximal aligned subtrees inside the run, and the raw elements of its pieces of blocks that a
// shard boundary cuts. Every rank then finishes the same tree from everybody's messages.
// Invariants: I1 the result depends on the gradients' bits and the order of parameters only.
//             I2 the message layout depends on the plan only, never on which gradients exist.
//             I3 absent parameters are passed over like absent leaves.
// Shapes: message layouts are in doubles (raw elements are widened exactly). Runs and cuts of a rank are in order of
//         parameter, then of block.
// Threads: immutable. Errors: std::invalid_argument.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "plugin/plan/shard_plan.h"

namespace trueshard::plan {

// Complete blocks of one parameter owned by one rank (the short last block of a parameter is complete too).
struct BlockRun {
  int64_t parameter;
  Range blocks;            // block indices of the parameter
  Range elements;          // the same as elements of the parameter
  int64_t message_offset;  // where its roots start in the rank's message, doubles
  int64_t root_count;
};
struct CutPiece {  // a piece of a block that another rank shares
  int64_t parameter;
  int64_t block;
  Range elements;          // of the parameter
  int64_t message_offset;  // its elements as doubles
};

class NormPlan {
 public:
  explicit NormPlan(const ShardPlan& plan);
  const std::vector<BlockRun>& runs(int rank) const;
  const std::vector<CutPiece>& cuts(int rank) const;
  int64_t message_doubles(int rank) const;

  using Combine = double (*)(double, double);  // sum, or NaN-propagating max
  // Writes the roots of one run from the values of its blocks (kernels' norm_blocks order) into the rank's message.
  void write_roots(const BlockRun& run, const double* block_values, Combine combine, double* message) const;
  // Value of one block from its raw elements (up to kBlock doubles): the caller runs the kernel with the right
  // NormKind.
  using BlockValue = std::function<double(const double* elements, int64_t count)>;
  // Finishes all trees: messages[rank] as laid out above; present[parameter]. Returns one value per parameter (0.0 for
  // absent).
  std::vector<double> parameter_values(const std::vector<const double*>& messages, const std::vector<bool>& present,
                                       Combine combine, const BlockValue& block_value) const;

 private:
  struct RankLayout {
    std::vector<BlockRun> runs;
    std::vector<CutPiece> cuts;
    int64_t doubles = 0;
  };
  struct Part {  // one run or one cut piece of a parameter; the parts of a parameter are in order and leave no gap
    int rank;
    Range blocks;  // one block for a cut piece
    int64_t message_offset;
    int64_t cut_elements;  // 0 for a run
  };
  void lay_out(int64_t parameter, int rank, const Range& elements, int64_t numel);
  void add_run(int64_t parameter, int rank, const Range& blocks, int64_t numel);
  void add_cut(int64_t parameter, int rank, const Range& elements);
  double finish(const std::vector<Part>& parts, const std::vector<const double*>& messages, Combine combine,
                const BlockValue& block_value) const;
  const RankLayout& layout(int rank) const;

  std::vector<std::vector<Part>> parts_;  // per parameter
  std::vector<RankLayout> ranks_;
};

// The canonical tree over all positions, where an absent one passes the other operand through (it keeps its place: what
// is absent does not move the others to other subtrees). All absent: 0.0.
double combine_values(const std::vector<double>& values, const std::vector<bool>& present, NormPlan::Combine combine);

}  // namespace trueshard::plan
