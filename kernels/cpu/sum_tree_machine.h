// SPDX-License-Identifier: BSD-3-Clause
// Role: runs any valid sum program, one block of kBlock elements at a time, so that its stack stays in the L1 cache.
// Invariants: all operands of a block are read before any output of it is written: stored values wait in a buffer.
// Shapes: buffers of kBlock accumulation numbers. Values beyond the block's end are zero up to a whole row.
// Threads: pure. Errors: none; programs are valid (kernels.h).
#pragma once
#include "kernels/cpu/sum_tree_finish.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {

// A counter over at most 2^63 leaves has at most 64 outputs, and its stack at most kMaxSumStack entries.
constexpr int kMaxStored = 64;

template <class Number>
struct Machine {
  alignas(64) Number buffers[kMaxSumStack + kMaxStored][kBlock];
  uint8_t unused[kMaxSumStack + kMaxStored];  // a stack of buffer numbers; the lowest on top, they are in the cache
  int unused_count;
  uint8_t stack[kMaxSumStack];
  int depth;
  struct Stored {
    uint8_t buffer, output;
  } stored[kMaxStored];
  int stored_count;
};

template <class Number>
TRUESHARD_INLINE void reset(Machine<Number>& machine) {
  machine.unused_count = kMaxSumStack + kMaxStored;
  for (int i = 0; i < machine.unused_count; ++i) machine.unused[i] = static_cast<uint8_t>(machine.unused_count - 1 - i);
  machine.depth = 0;
  machine.stored_count = 0;
}

struct Replace {
  static TRUESHARD_INLINE Floats combine(const float*, Floats loaded) { return loaded; }
  static TRUESHARD_INLINE double combine(double, double loaded) { return loaded; }
};
struct AddTo {
  static TRUESHARD_INLINE Floats combine(const float* top, Floats loaded) { return add(load_f32(top), loaded); }
  static TRUESHARD_INLINE double combine(double top, double loaded) { return top + loaded; }
};

template <class Type, class How>
TRUESHARD_INLINE void take_rows(float* buffer, const void* data, int64_t begin, int64_t count) {
  const auto* source = static_cast<const typename Type::Element*>(data) + begin;
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) store_f32(buffer + i, How::combine(buffer + i, Type::load(source + i)));
  if (i < count) store_f32(buffer + i, How::combine(buffer + i, load_part<Type>(source + i, count - i)));
}

template <class How>
inline void take(float* buffer, const Operand& operand, int64_t begin, int64_t count) {
  switch (operand.dtype) {
    case DType::kFloat32:
      return take_rows<Float32, How>(buffer, operand.data, begin, count);
    case DType::kBFloat16:
      return take_rows<BFloat16, How>(buffer, operand.data, begin, count);
    case DType::kFloat16:
      return take_rows<Float16, How>(buffer, operand.data, begin, count);
    case DType::kFloat64:
      return;  // fp64 operands are summed in fp64 (kernels.h)
  }
}
template <class How>
inline void take(double* buffer, const Operand& operand, int64_t begin, int64_t count) {
  const double* source = static_cast<const double*>(operand.data) + begin;
  for (int64_t i = 0; i < count; ++i) buffer[i] = How::combine(buffer[i], source[i]);
}

TRUESHARD_INLINE void add_buffers(float* a, const float* b, int64_t count) {
  for (int64_t i = 0; i < count; i += kRow) store_f32(a + i, add(load_f32(a + i), load_f32(b + i)));
}
TRUESHARD_INLINE void add_buffers(double* a, const double* b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) a[i] = a[i] + b[i];
}

template <class Number>
inline void run_block(Machine<Number>& machine, const SumTreeCall& call, int64_t begin, int64_t count) {
  for (int s = 0; s < call.step_count; ++s) {
    const SumStep step = call.steps[s];
    if (step.kind == SumStep::Kind::kLoad) {
      const bool added_at_once = s + 1 < call.step_count && call.steps[s + 1].kind == SumStep::Kind::kAdd;
      if (added_at_once) {
        take<AddTo>(machine.buffers[machine.stack[machine.depth - 1]], call.operands[step.index], begin, count);
        ++s;
      } else {
        const uint8_t buffer = machine.unused[--machine.unused_count];
        machine.stack[machine.depth++] = buffer;
        take<Replace>(machine.buffers[buffer], call.operands[step.index], begin, count);
      }
    } else if (step.kind == SumStep::Kind::kAdd) {
      const uint8_t b = machine.stack[--machine.depth];
      add_buffers(machine.buffers[machine.stack[machine.depth - 1]], machine.buffers[b], count);
      machine.unused[machine.unused_count++] = b;
    } else {
      machine.stored[machine.stored_count++] = {machine.stack[--machine.depth], step.index};
    }
  }
}

template <class Number>
inline void run_machine(const SumTreeCall& call, const Finish<Number>& finish) {
  Machine<Number> machine;
  reset(machine);
  for (int64_t begin = 0; begin < call.count; begin += kBlock) {
    const int64_t count = call.count - begin < kBlock ? call.count - begin : kBlock;
    run_block(machine, call, begin, count);
    for (int s = 0; s < machine.stored_count; ++s) {
      Number* block = machine.buffers[machine.stored[s].buffer];
      const int output = machine.stored[s].output;
      if (output == 0) {
        finish_block(finish, block, begin, count);
      } else {
        __builtin_memcpy(static_cast<Number*>(call.outputs[output]) + begin, block,
                         static_cast<size_t>(count) * sizeof(Number));
      }
      machine.unused[machine.unused_count++] = machine.stored[s].buffer;
    }
    machine.stored_count = 0;
  }
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
