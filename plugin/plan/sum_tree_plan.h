// SPDX-License-Identifier: BSD-3-Clause
// Role: the canonical summation tree (docs/numerics.md section 1) compiled to programs for kernels' sum_tree.
// The streaming form is a binary counter: after n leaves, slot k (for each bit k of n) holds an aligned subtree of 2^k
// leaves.
// Invariants: I1 push + finish over any split into passes equals T(0, n) over the leaves.
//             I2 an absent operand passes the other one through; a slot is absent when all its leaves are.
//             I3 at most floor(log2 n) + 1 slots.
//             I4 all stores of a program come after all its loads, so an output may alias any operand exactly.
// Shapes: an operand or output is one shard-sized array; absent ones appear nowhere in a program.
// Threads: pure functions. Errors: std::invalid_argument for more leaves than fit in 63 bits, more than 255 operands,
// or a slot said to be present that the counter does not have.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace trueshard::plan {

// Slots of the binary counter that are filled after `leaves` leaves: bit k of `leaves`, largest first.
std::vector<int> slots_of(uint64_t leaves);

struct SumProgram {
  std::vector<kernels::SumStep> steps;
  // Operand i of the program: a slot of the counter before the push, or a new leaf.
  struct Source {
    bool is_slot;
    int index;  // slot number k, or position among the new leaves
  };
  std::vector<Source> operands;
  // Output i of the program is slot output_slots[i] after the push (present slots only, smallest first).
  std::vector<int> output_slots;
};

// Pushes new leaves onto a counter that holds `leaves_before`. slot_present[k]: slot k exists and is present (entries
// beyond the vector are absent); leaf_present[i] of the new leaves in leaf order. Slots that do not change are not part
// of the program.
SumProgram push_program(uint64_t leaves_before, const std::vector<bool>& slot_present,
                        const std::vector<bool>& leaf_present);
// Which slots are present after that push (index k), given the same arguments.
std::vector<bool> slots_present_after(uint64_t leaves_before, const std::vector<bool>& slot_present,
                                      const std::vector<bool>& leaf_present);
// Merges what is left from the smallest slot up: T(0, leaves). One output (output_slots = {0}, meaning "the result");
// empty steps when everything is absent.
SumProgram finish_program(uint64_t leaves, const std::vector<bool>& slot_present);
// The whole tree at once over leaves that are all at hand (A = 1): one output.
SumProgram whole_program(const std::vector<bool>& leaf_present);

}  // namespace trueshard::plan
