// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/partial_sums.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/parallel.h"

namespace trueshard::engine {

PartialSums::PartialSums(ShardedModel& model, int64_t bucket)
    : model_(model),
      bucket_(model.plan().buckets[bucket]),
      slot_present_(bucket_.placements.size()),
      base_(bucket_.placements.size(), false),
      run_of_(bucket_.placements.size(), -1) {
  const auto& runs = model.norm_plan().runs(model.rank());
  for (size_t i = 0; i < bucket_.placements.size(); ++i) {
    for (size_t r = 0; r < runs.size(); ++r) {
      if (runs[r].parameter == bucket_.placements[i].parameter) run_of_[i] = static_cast<int64_t>(r);
    }
  }
}

bool PartialSums::has_sum(int64_t placement) const {
  const auto& slots = slot_present_[placement];
  return std::find(slots.begin(), slots.end(), true) != slots.end();
}

bool PartialSums::any_base() const { return std::find(base_.begin(), base_.end(), true) != base_.end(); }

int64_t PartialSums::extra_bytes() const {
  int64_t bytes = 0;
  for (const auto& buffer : extra_) bytes += static_cast<int64_t>(buffer.nbytes());
  return bytes;
}

void PartialSums::clear() {
  leaves_ = 0;
  for (auto& slots : slot_present_) slots.clear();
  extra_.clear();
}

void PartialSums::drop(int64_t placement) {
  slot_present_[placement].clear();
  base_[placement] = false;
}

// The i-th filled slot (largest first) lives in the i-th place: gradient memory first, unless that holds bases.
std::byte* PartialSums::slot_data(int slot, int64_t placement, const std::vector<int>& slots) const {
  auto place = static_cast<size_t>(std::find(slots.begin(), slots.end(), slot) - slots.begin()) + (keep_base_ ? 1 : 0);
  const int64_t parameter = bucket_.placements[placement].parameter;
  const auto piece = model_.plan().piece(parameter, model_.rank());
  if (place == 0) {
    const int64_t skip = model_.replicated() ? piece.in_parameter.begin : 0;
    return model_.gradient(parameter) + skip * bucket_.master_itemsize;
  }
  return static_cast<std::byte*>(extra_[place - 1].data_ptr()) + piece.shard_offset * bucket_.master_itemsize;
}

void PartialSums::reserve_buffers(size_t count) {
  while (extra_.size() < count) {
    extra_.push_back(at::empty({bucket_.shard},
                               at::TensorOptions().dtype(bucket_.master_itemsize == 8 ? c10::kDouble : c10::kFloat)));
  }
}

void PartialSums::push(const std::vector<std::vector<Leaf>>& leaves) {
  const int world = model_.world();
  if (leaves_ == 0) keep_base_ = any_base();
  const auto before = plan::slots_of(leaves_), after = plan::slots_of(leaves_ + world);
  // Old slots that merge keep their places until the push is done, and a place may serve both: kernels allow exact
  // aliases.
  const size_t places = std::max(before.size(), after.size());
  reserve_buffers(places - (keep_base_ ? 0 : 1));
  plan::SumProgram program;
  std::vector<bool> program_slots, program_leaves, present(world);
  bool compiled = false;
  for (size_t i = 0; i < bucket_.placements.size(); ++i) {
    for (int r = 0; r < world; ++r) present[r] = leaves[r][i].data != nullptr;
    auto& slots = slot_present_[i];
    if (!compiled || program_slots != slots || program_leaves != present) {
      program = plan::push_program(leaves_, slots, present);
      program_slots = slots;
      program_leaves = present;
      compiled = true;
    }
    const int64_t parameter = bucket_.placements[i].parameter;
    if (!model_.piece(parameter, model_.rank()).empty()) run(program, static_cast<int64_t>(i), before, after, leaves);
    slots = plan::slots_present_after(leaves_, program_slots, program_leaves);
  }
  leaves_ += world;
  // Places beyond the slots that are left are not needed any more.
  const size_t needed = after.size() - (keep_base_ ? 0 : 1);
  if (extra_.size() > needed) extra_.resize(needed);
}

void PartialSums::run(const plan::SumProgram& program, int64_t placement, const std::vector<int>& before,
                      const std::vector<int>& after, const std::vector<std::vector<Leaf>>& leaves) const {
  if (program.steps.empty()) return;
  const int64_t parameter = bucket_.placements[placement].parameter;
  const auto piece = model_.piece(parameter, model_.rank());
  const bool fp64 = bucket_.master_itemsize == 8;
  const auto sum_dtype = fp64 ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
  std::vector<kernels::Operand> operands;
  for (const auto& source : program.operands) {
    if (source.is_slot) {
      operands.push_back({slot_data(source.index, placement, before), sum_dtype});
    } else {
      const auto& leaf = leaves[source.index][placement];
      const auto dtype = kernel_dtype(leaf.dtype);
      operands.push_back({leaf.data + piece.begin * kernels::itemsize(dtype), dtype});
    }
  }
  std::vector<std::byte*> outputs;
  for (const int slot : program.output_slots) outputs.push_back(slot_data(slot, placement, after));
  for_blocks(piece.size(), [&](int64_t begin, int64_t end) {
    auto shifted = operands;
    for (auto& operand : shifted)
      operand.data = static_cast<const std::byte*>(operand.data) + begin * kernels::itemsize(operand.dtype);
    std::vector<void*> targets;
    for (auto* output : outputs) targets.push_back(output + begin * kernels::itemsize(sum_dtype));
    kernels::SumTreeCall call{program.steps.data(),
                              static_cast<int>(program.steps.size()),
                              shifted.data(),
                              targets.data(),
                              end - begin,
                              fp64,
                              sum_dtype,
                              {}};
    kernels::kernels().sum_tree(call);
  });
}

void PartialSums::finish(double divisor, GradientRecord& record) {
  for (size_t i = 0; i < bucket_.placements.size(); ++i) {
    finish_parameter(static_cast<int64_t>(i), divisor, record);
    if (has_sum(static_cast<int64_t>(i))) base_[i] = true;
  }
  clear();
}

void PartialSums::finish_parameter(int64_t placement, double divisor, GradientRecord& record) {
  const int64_t parameter = bucket_.placements[placement].parameter;
  const auto piece = model_.piece(parameter, model_.rank());
  const bool sum = has_sum(placement);
  if (piece.empty() || (!sum && !base_[placement])) return;
  const bool fp64 = bucket_.master_itemsize == 8;
  const auto dtype = fp64 ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
  const int64_t skip = model_.replicated() ? piece.begin : 0;
  std::byte* gradient = model_.gradient(parameter) + skip * bucket_.master_itemsize;
  plan::SumProgram program;
  std::vector<kernels::Operand> operands;
  if (sum) {
    const auto slots = plan::slots_of(leaves_);
    program = plan::finish_program(leaves_, slot_present_[placement]);
    for (const auto& source : program.operands) operands.push_back({slot_data(source.index, placement, slots), dtype});
  } else {  // a gradient that stays as it is: only recorded
    program.steps = {{kernels::SumStep::Kind::kLoad, 0}, {kernels::SumStep::Kind::kStore, 0}};
    operands.push_back({gradient, dtype});
  }
  const int64_t run_index = run_of_[placement];
  const auto run =
      run_index < 0 ? plan::Range{piece.end, piece.end} : model_.norm_plan().runs(model_.rank())[run_index].elements;
  std::atomic<bool> nonfinite{false};
  const auto segment = [&](plan::Range range, double* squares) {
    for_blocks(range.size(), [&](int64_t begin, int64_t end) {
      const int64_t offset = range.begin - piece.begin + begin;
      auto shifted = operands;
      for (auto& operand : shifted)
        operand.data = static_cast<const std::byte*>(operand.data) + offset * kernels::itemsize(dtype);
      void* target = gradient + offset * kernels::itemsize(dtype);
      uint8_t bad = 0;
      kernels::SumTreeCall call{program.steps.data(),
                                static_cast<int>(program.steps.size()),
                                shifted.data(),
                                &target,
                                end - begin,
                                fp64,
                                dtype,
                                {}};
      call.epilogue.divide = sum && divisor != 1.0;
      call.epilogue.divisor = fp64 ? divisor : static_cast<double>(static_cast<float>(divisor));
      call.epilogue.base = sum && base_[placement] ? target : nullptr;
      call.epilogue.nonfinite = &bad;
      call.epilogue.square_sums = squares ? squares + begin / kernels::kBlock : nullptr;
      kernels::kernels().sum_tree(call);
      if (bad) nonfinite.store(true, std::memory_order_relaxed);
    });
  };
  if (run_index >= 0) {
    auto& squares = record.block_squares[run_index];
    squares.resize(static_cast<size_t>(model_.norm_plan().runs(model_.rank())[run_index].blocks.size()));
    segment({piece.begin, run.begin}, nullptr);
    // fp64 squares may overflow; the norm of fp64 gradients is taken from the gradients themselves.
    segment(run, fp64 ? nullptr : squares.data());
    segment({run.end, piece.end}, nullptr);
  } else {
    segment(piece, nullptr);
  }
  if (nonfinite.load()) record.nonfinite = true;
  record_cuts(placement, gradient, record);
}

void PartialSums::record_cuts(int64_t placement, const std::byte* gradient, GradientRecord& record) const {
  const int64_t parameter = bucket_.placements[placement].parameter;
  const int64_t begin = model_.piece(parameter, model_.rank()).begin;
  const auto dtype = bucket_.master_itemsize == 8 ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
  const auto& cuts = model_.norm_plan().cuts(model_.rank());
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (cuts[i].parameter != parameter) continue;
    record.cut_elements[i].resize(static_cast<size_t>(cuts[i].elements.size()));
    kernels::kernels().cast(gradient + (cuts[i].elements.begin - begin) * kernels::itemsize(dtype), dtype,
                            record.cut_elements[i].data(), kernels::DType::kFloat64, cuts[i].elements.size());
  }
}

}  // namespace trueshard::engine
