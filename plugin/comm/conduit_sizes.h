// SPDX-License-Identifier: BSD-3-Clause
// Role: how large the chunks are in which collectives pass through the staging area. Functions of sizes that all ranks
// have agreed on, so that all ranks cut alike. Invariants: a chunk of the largest element type, and the pieces of all
// ranks together, fit into a slot. Threads: pure functions. Errors: none.
#pragma once
#include <algorithm>
#include <cstdint>

namespace trueshard::comm {

constexpr int kSlots = 4;
constexpr int64_t kLargeChunk = int64_t{1} << 18, kSmallChunk = int64_t{1} << 16;  // elements
constexpr int64_t kLargestPiece = int64_t{1} << 20;                                // bytes
constexpr int64_t kSlotInput = kLargeChunk * 8;
constexpr int64_t kSlotResult = kLargeChunk * 4;  // a part of a chunk: half of it at most, plus rounding
constexpr int64_t kSlotBytes = kSlotInput + kSlotResult + 4096 + 128;  // slots too lie apart in the cache sets

inline int64_t slot_offset(uint64_t seq) { return static_cast<int64_t>(seq % kSlots) * kSlotBytes; }

// Measured: 256K elements are best for large arrays, 64K below about a million.
inline int64_t chunk_elements(int64_t elements) { return elements >= (int64_t{1} << 20) ? kLargeChunk : kSmallChunk; }
inline int64_t chunk_bytes(int64_t bytes) { return bytes >= (int64_t{4} << 20) ? kLargestPiece : kLargestPiece / 4; }
// One of `ranks` pieces that share a slot, a multiple of 64.
inline int64_t piece_bytes(int64_t bytes, int ranks) {
  return std::max<int64_t>(64, chunk_bytes(bytes * ranks) / ranks / 64 * 64);
}
// An empty array is one empty chunk.
inline int64_t chunks_of(int64_t size, int64_t chunk) { return std::max<int64_t>(1, (size + chunk - 1) / chunk); }
inline int64_t part(int64_t size, int64_t chunk, int64_t k) { return std::clamp<int64_t>(size - k * chunk, 0, chunk); }

}  // namespace trueshard::comm
