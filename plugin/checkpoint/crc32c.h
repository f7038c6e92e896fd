// SPDX-License-Identifier: BSD-3-Clause
// Role: CRC-32C (Castagnoli), as iSCSI and ext4 use it: extended while bytes pass by, and put together from the sums of
// neighbouring parts, so that several ranks can check one tensor.
// Invariants: I1 the same number with and without SSE4.2. Threads: pure functions. Errors: none.
#pragma once
#include <cstddef>
#include <cstdint>

namespace trueshard::checkpoint {

// The sum of (bytes before, whose sum is `crc`) + data. Start with 0.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t crc = 0);  // without special instructions
// The sum of two parts in a row, the second `second_bytes` long.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes);

// Sums of parts in any order, by several ranks: a part's share says what it adds to the sum of the whole, wherever its
// bytes lie; shares are put together by xor.
uint32_t crc32c_share(uint32_t crc, uint64_t bytes, uint64_t bytes_after);
uint32_t crc32c_of_shares(uint32_t shares, uint64_t total_bytes);

}  // namespace trueshard::checkpoint
