// SPDX-License-Identifier: BSD-3-Clause
// Role: declares the functions that every instruction set defines, each set in its own namespace.
// Invariants: the functions expect the default MXCSR; dispatch.cpp sets it around each call.
// Shapes, Threads, Errors: as in kernels.h.
#pragma once
#include "kernels/kernels.h"

#define TRUESHARD_KERNEL_ENTRY_POINTS(isa)                                                                  \
  namespace trueshard::kernels::isa {                                                                       \
  void sum_tree(const SumTreeCall& call);                                                                   \
  void cast(const void* in, DType in_dtype, void* out, DType out_dtype, int64_t count);                     \
  void unscale_and_check(void* data, DType dtype, int64_t count, double inverse_scale, uint8_t* nonfinite); \
  void scale(void* data, DType dtype, int64_t count, double factor);                                        \
  void norm_blocks(const NormCall& call);                                                                   \
  void adam(const AdamCall& call);                                                                          \
  void sgd(const SgdCall& call);                                                                            \
  }
