// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/norm_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>
#include <string>

#include "kernels/kernels.h"

namespace trueshard::plan {
namespace {

using kernels::kBlock;

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument("trueshard norm plan: " + text); }

int64_t block_count(int64_t elements) { return elements / kBlock + (elements % kBlock != 0 ? 1 : 0); }

// Blocks in the largest aligned power-of-two subtree that starts at `begin` and ends at or before `end`. Every such
// subtree is a node of T(0, n) for any n >= end, because T cuts off the largest power of two first.
int64_t root_size(int64_t begin, int64_t end) {
  const auto room = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(end - begin)));
  return begin == 0 ? room : std::min(room, begin & -begin);
}

int64_t count_roots(Range blocks) {
  int64_t roots = 0;
  for (int64_t at = blocks.begin; at < blocks.end; at += root_size(at, blocks.end)) ++roots;
  return roots;
}

// A binary counter over subtrees that come in order, each aligned to its own size and starting where the last one
// ended: the stack always holds the subtrees of the bits of the count so far, so equal sizes on top are siblings.
class TreeCounter {
 public:
  explicit TreeCounter(NormPlan::Combine combine) : combine_(combine) {}

  void push(int64_t size, bool present, double value) {
    nodes_[static_cast<size_t>(depth_++)] = {size, present, value};
    while (depth_ >= 2 && nodes_[static_cast<size_t>(depth_ - 2)].size == nodes_[static_cast<size_t>(depth_ - 1)].size)
      merge();
  }

  // Merges the rest from the smallest up: the right spine of T. Nothing present: 0.0.
  double finish() {
    while (depth_ >= 2) merge();
    const double value = depth_ == 1 && nodes_[0].present ? nodes_[0].value : 0.0;
    depth_ = 0;
    return value;
  }

 private:
  struct Node {
    int64_t size;
    bool present;
    double value;
  };

  void merge() {
    Node& left = nodes_[static_cast<size_t>(depth_ - 2)];
    const Node& right = nodes_[static_cast<size_t>(depth_ - 1)];
    if (left.present && right.present) {
      left.value = combine_(left.value, right.value);
    } else if (right.present) {
      left.value = right.value;
    }
    left.present = left.present || right.present;
    left.size += right.size;
    --depth_;
  }

  NormPlan::Combine combine_;
  std::array<Node, 65> nodes_{};  // one for each bit of a 64-bit count and the one just pushed
  int depth_ = 0;
};

}  // namespace

NormPlan::NormPlan(const ShardPlan& plan)
    : parts_(plan.parameters.size()), ranks_(static_cast<size_t>(std::max(plan.world, 0))) {
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const auto parameter = static_cast<int64_t>(i);
    const int64_t numel = plan.parameters[i].numel;
    if (numel == 0) continue;
    const BucketPlan& bucket = plan.buckets[static_cast<size_t>(plan.bucket_of[i])];
    const Placement& placement = bucket.placements[static_cast<size_t>(plan.placement_of[i])];
    const int64_t last_rank = (placement.offset + numel - 1) / bucket.shard;
    for (int64_t rank = placement.offset / bucket.shard; rank <= last_rank; ++rank) {
      lay_out(parameter, static_cast<int>(rank), plan.piece(parameter, static_cast<int>(rank)).in_parameter, numel);
    }
  }
}

// A block is complete on this rank when both its ends are; the parameter's end completes its short last block.
void NormPlan::lay_out(int64_t parameter, int rank, const Range& elements, int64_t numel) {
  const bool holds_end = elements.end == numel;
  const Range blocks{block_count(elements.begin), holds_end ? block_count(numel) : elements.end / kBlock};
  if (blocks.size() < 0) {  // the piece lies inside one block
    add_cut(parameter, rank, elements);
    return;
  }
  const int64_t run_begin = std::min(blocks.begin * kBlock, elements.end);
  if (elements.begin < run_begin) add_cut(parameter, rank, {elements.begin, run_begin});
  if (!blocks.empty()) add_run(parameter, rank, blocks, numel);
  if (!holds_end && blocks.end * kBlock < elements.end) add_cut(parameter, rank, {blocks.end * kBlock, elements.end});
}

void NormPlan::add_run(int64_t parameter, int rank, const Range& blocks, int64_t numel) {
  RankLayout& layout = ranks_[static_cast<size_t>(rank)];
  const Range elements{blocks.begin * kBlock, std::min(blocks.end * kBlock, numel)};
  layout.runs.push_back({parameter, blocks, elements, layout.doubles, count_roots(blocks)});
  parts_[static_cast<size_t>(parameter)].push_back({rank, blocks, layout.doubles, 0});
  layout.doubles += layout.runs.back().root_count;
}

void NormPlan::add_cut(int64_t parameter, int rank, const Range& elements) {
  RankLayout& layout = ranks_[static_cast<size_t>(rank)];
  const int64_t block = elements.begin / kBlock;
  layout.cuts.push_back({parameter, block, elements, layout.doubles});
  parts_[static_cast<size_t>(parameter)].push_back({rank, {block, block + 1}, layout.doubles, elements.size()});
  layout.doubles += elements.size();
}

const NormPlan::RankLayout& NormPlan::layout(int rank) const {
  if (rank < 0 || static_cast<size_t>(rank) >= ranks_.size()) {
    fail("layout of rank " + std::to_string(rank) + ", expected 0 to " + std::to_string(ranks_.size()) +
         " (exclusive); the plan was made for that world");
  }
  return ranks_[static_cast<size_t>(rank)];
}

const std::vector<BlockRun>& NormPlan::runs(int rank) const { return layout(rank).runs; }
const std::vector<CutPiece>& NormPlan::cuts(int rank) const { return layout(rank).cuts; }
int64_t NormPlan::message_doubles(int rank) const { return layout(rank).doubles; }

void NormPlan::write_roots(const BlockRun& run, const double* block_values, Combine combine, double* message) const {
  double* root = message + run.message_offset;
  TreeCounter tree(combine);
  for (int64_t at = run.blocks.begin; at < run.blocks.end;) {
    const int64_t size = root_size(at, run.blocks.end);
    for (int64_t i = 0; i < size; ++i) tree.push(1, true, *block_values++);
    *root++ = tree.finish();
    at += size;
  }
}

double NormPlan::finish(const std::vector<Part>& parts, const std::vector<const double*>& messages, Combine combine,
                        const BlockValue& block_value) const {
  TreeCounter tree(combine);
  std::array<double, kBlock> block{};
  for (size_t i = 0; i < parts.size();) {
    const Part& part = parts[i];
    const double* root = messages[static_cast<size_t>(part.rank)] + part.message_offset;
    if (part.cut_elements == 0) {
      for (int64_t at = part.blocks.begin; at < part.blocks.end;) {
        const int64_t size = root_size(at, part.blocks.end);
        tree.push(size, true, *root++);
        at += size;
      }
      ++i;
      continue;
    }
    double* end = block.data();  // the pieces of one block follow each other and make it whole
    for (; i < parts.size() && parts[i].cut_elements != 0 && parts[i].blocks == part.blocks; ++i) {
      const double* piece = messages[static_cast<size_t>(parts[i].rank)] + parts[i].message_offset;
      end = std::copy_n(piece, parts[i].cut_elements, end);
    }
    tree.push(1, true, block_value(block.data(), end - block.data()));
  }
  return tree.finish();
}

std::vector<double> NormPlan::parameter_values(const std::vector<const double*>& messages,
                                               const std::vector<bool>& present, Combine combine,
                                               const BlockValue& block_value) const {
  if (messages.size() != ranks_.size() || present.size() != parts_.size()) {
    fail("got " + std::to_string(messages.size()) + " messages and " + std::to_string(present.size()) +
         " presence bits, expected " + std::to_string(ranks_.size()) + " (ranks) and " + std::to_string(parts_.size()) +
         " (parameters); pass one for each, absent ones included");
  }
  std::vector<double> values(parts_.size(), 0.0);
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (present[i]) values[i] = finish(parts_[i], messages, combine, block_value);
  }
  return values;
}

double combine_values(const std::vector<double>& values, const std::vector<bool>& present, NormPlan::Combine combine) {
  if (values.size() != present.size()) {
    fail("got " + std::to_string(values.size()) + " values and " + std::to_string(present.size()) +
         " presence bits, expected one for each value");
  }
  TreeCounter tree(combine);
  for (size_t i = 0; i < values.size(); ++i) tree.push(1, present[i], values[i]);
  return tree.finish();
}

}  // namespace trueshard::plan
