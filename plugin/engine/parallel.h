// SPDX-License-Identifier: BSD-3-Clause
// Role: splits element loops over libtorch's intra-op threads in pieces whose boundaries are multiples of a norm block,
// so that no result depends on the thread count.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "kernels/kernels.h"

namespace trueshard::engine {

// Calls body(begin, end) over [0, count); begin is always a multiple of kernels::kBlock.
template <typename Body>
void for_blocks(int64_t count, const Body& body) {
  constexpr int64_t kGrain = int64_t{1} << 16;  // elements: below this a thread costs more than it brings
  if (count <= kGrain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  const int64_t blocks = (count + kernels::kBlock - 1) / kernels::kBlock;
  at::parallel_for(0, blocks, kGrain / kernels::kBlock, [&](int64_t first, int64_t last) {
    body(first * kernels::kBlock, std::min(count, last * kernels::kBlock));
  });
}

}  // namespace trueshard::engine
