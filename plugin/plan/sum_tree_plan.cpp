// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/sum_tree_plan.h"

#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

namespace trueshard::plan {
namespace {

using kernels::SumStep;
constexpr size_t kMaxOperands = 255;  // SumStep::index is one byte

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument("trueshard sum tree: " + text); }

bool bit(uint64_t leaves, int slot) { return ((leaves >> slot) & 1u) != 0; }

bool present_in(const std::vector<bool>& slots, int slot) {
  return static_cast<size_t>(slot) < slots.size() && slots[static_cast<size_t>(slot)];
}

void check_leaves(uint64_t before, uint64_t added) {
  constexpr uint64_t kMaxLeaves = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (before > kMaxLeaves || added > kMaxLeaves - before) {
    fail("push of " + std::to_string(added) + " leaves after " + std::to_string(before) +
         ", expected less than 2^63 in all; step or zero the gradients before");
  }
}

void check_slots(uint64_t leaves, const std::vector<bool>& slot_present) {
  for (size_t slot = 0; slot < slot_present.size(); ++slot) {
    if (slot_present[slot] && (slot >= 63 || !bit(leaves, static_cast<int>(slot)))) {
      fail("slot " + std::to_string(slot) + " is said to be present after " + std::to_string(leaves) +
           " leaves, expected only slots whose bit is set there; pass slots_present_after of the last push");
    }
  }
}

// The entries of the counter, oldest and largest first. An absent entry takes part in the counting and has no value on
// the machine's stack, so the present entries are the stack, in order.
class Counter {
 public:
  struct Entry {
    int slot;
    bool present;
  };

  void load(SumProgram& program, SumProgram::Source source) {
    if (program.operands.size() == kMaxOperands) {
      fail("more than 255 present leaves and slots in one program, expected at most 255; push them in several passes");
    }
    program.steps.push_back({SumStep::Kind::kLoad, static_cast<uint8_t>(program.operands.size())});
    program.operands.push_back(source);
    if (++depth_ > kernels::kMaxSumStack) fail("the program needs a deeper stack than kMaxSumStack");
  }

  void old_slot(SumProgram& program, int slot, bool present) {
    if (present) load(program, {true, slot});
    entries_.push_back({slot, present});
  }

  void leaf(SumProgram& program, int index, bool present) {
    if (present) load(program, {false, index});
    entries_.push_back({0, present});
    while (entries_.size() >= 2 && entries_[entries_.size() - 2].slot == entries_.back().slot) merge(program);
  }

  // left + right, left = older leaves; an absent operand passes the other one through
  void merge(SumProgram& program) {
    const Entry right = entries_.back();
    entries_.pop_back();
    Entry& left = entries_.back();
    if (left.present && right.present) {
      program.steps.push_back({SumStep::Kind::kAdd, 0});
      --depth_;
    }
    left.present = left.present || right.present;
    ++left.slot;  // meaningless while finishing, where sizes differ
  }

  void store(SumProgram& program, int slot) {
    program.steps.push_back({SumStep::Kind::kStore, static_cast<uint8_t>(program.output_slots.size())});
    program.output_slots.push_back(slot);
    --depth_;
  }

  const std::vector<Entry>& entries() const { return entries_; }

  // Merges everything from the smallest up into one output, if anything is present.
  void finish(SumProgram& program) {
    while (entries_.size() >= 2) merge(program);
    if (!entries_.empty() && entries_.back().present) store(program, 0);
  }

  // Smallest first, as they lie on the stack. All stores come after all loads: an output may alias any operand.
  void store_all(SumProgram& program) {
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      if (entry->present) store(program, entry->slot);
    }
  }

 private:
  std::vector<Entry> entries_;
  int depth_ = 0;
};

// The slots below this one take part in a push and are replaced by it; the slots above it stay as they are.
int highest_changed_slot(uint64_t before, uint64_t after) { return 63 - std::countl_zero(before ^ after); }

Counter run_push(SumProgram& program, uint64_t leaves_before, const std::vector<bool>& slot_present,
                 const std::vector<bool>& leaf_present) {
  Counter counter;
  // Adding changes bit h from 0 to 1 and no higher one: the new slot h holds all old slots below it.
  const int top = highest_changed_slot(leaves_before, leaves_before + leaf_present.size());
  for (int slot = top - 1; slot >= 0; --slot) {
    if (bit(leaves_before, slot)) counter.old_slot(program, slot, present_in(slot_present, slot));
  }
  for (size_t i = 0; i < leaf_present.size(); ++i) counter.leaf(program, static_cast<int>(i), leaf_present[i]);
  return counter;
}

}  // namespace

std::vector<int> slots_of(uint64_t leaves) {
  std::vector<int> slots;
  for (int slot = 63; slot >= 0; --slot) {
    if (bit(leaves, slot)) slots.push_back(slot);
  }
  return slots;
}

SumProgram push_program(uint64_t leaves_before, const std::vector<bool>& slot_present,
                        const std::vector<bool>& leaf_present) {
  check_leaves(leaves_before, leaf_present.size());
  check_slots(leaves_before, slot_present);
  SumProgram program;
  if (!leaf_present.empty()) run_push(program, leaves_before, slot_present, leaf_present).store_all(program);
  return program;
}

std::vector<bool> slots_present_after(uint64_t leaves_before, const std::vector<bool>& slot_present,
                                      const std::vector<bool>& leaf_present) {
  check_leaves(leaves_before, leaf_present.size());
  check_slots(leaves_before, slot_present);
  const uint64_t after = leaves_before + leaf_present.size();
  std::vector<bool> result(static_cast<size_t>(std::bit_width(after)), false);
  const int top = leaf_present.empty() ? -1 : highest_changed_slot(leaves_before, after);
  for (int slot : slots_of(after)) {
    if (slot > top) result[static_cast<size_t>(slot)] = present_in(slot_present, slot);
  }
  if (top < 0) return result;
  SumProgram unused;
  const Counter counter = run_push(unused, leaves_before, slot_present, leaf_present);
  for (const Counter::Entry& entry : counter.entries()) result[static_cast<size_t>(entry.slot)] = entry.present;
  return result;
}

SumProgram finish_program(uint64_t leaves, const std::vector<bool>& slot_present) {
  check_leaves(leaves, 0);
  check_slots(leaves, slot_present);
  SumProgram program;
  Counter counter;
  for (int slot : slots_of(leaves)) counter.old_slot(program, slot, present_in(slot_present, slot));
  counter.finish(program);
  return program;
}

SumProgram whole_program(const std::vector<bool>& leaf_present) {
  SumProgram program;
  if (leaf_present.empty()) return program;
  Counter counter = run_push(program, 0, {}, leaf_present);
  counter.finish(program);
  return program;
}

}  // namespace trueshard::plan
