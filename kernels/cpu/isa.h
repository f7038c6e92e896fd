// SPDX-License-Identifier: BSD-3-Clause
// Role: maps TRUESHARD_CPU_LEVEL (set by CMake) to a namespace and to the vector types of that instruction set.
// Invariants: I1 everything here and in cpu/ lives in the level's own namespace: a function emitted under a
//             common name could be the AVX-512 copy, and the linker might pick it for the plain build.
//             I2 for the same reason no std:: template and no inline function of kernels.h is used in cpu/.
// Shapes: a row is 16 elements on every level. Threads: pure. Errors: none.
#pragma once
#include <cstddef>

#include "kernels/entry_points.h"

#if TRUESHARD_CPU_LEVEL == 0
#define TRUESHARD_CPU_ISA cpu_scalar
#elif TRUESHARD_CPU_LEVEL == 1
#define TRUESHARD_CPU_ISA cpu_avx2
#else
#define TRUESHARD_CPU_ISA cpu_avx512
#endif

// Sanitizers check every lane of every copy: inlined into one another, the plain rows take the compiler minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TRUESHARD_INLINE inline
#else
#define TRUESHARD_INLINE inline __attribute__((always_inline))
#endif

TRUESHARD_KERNEL_ENTRY_POINTS(TRUESHARD_CPU_ISA)

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
constexpr int kRow = 16;
}

#if TRUESHARD_CPU_LEVEL == 0
#include "kernels/cpu/vec_scalar.h"
#elif TRUESHARD_CPU_LEVEL == 1
#include "kernels/cpu/vec_avx2.h"
#else
#include "kernels/cpu/vec_avx512.h"
#endif
