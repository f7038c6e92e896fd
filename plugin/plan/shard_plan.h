// SPDX-License-Identifier: BSD-3-Clause
// Role: who owns which elements. Parameters are packed into buckets in the agreed order; a bucket is cut into `world`
// equal shards.
// Invariants: I1 every element has exactly one owner. I2 padding has no parameter. I3 all arithmetic is 64-bit.
//             I4 a parameter starts at a multiple of kParameterAlignment elements, a shard at one of kShardAlignment.
//             I5 the bits of no result depend on anything decided here.
//             I6 an empty parameter has a placement of its own, at an offset of at most `padded`.
// Shapes: offsets and counts are elements, never bytes.
// Threads: immutable after construction. Errors: std::invalid_argument.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace trueshard::plan {

constexpr int64_t kParameterAlignment = 64;  // elements: 64 bytes even for one-byte compute dtypes
constexpr int64_t kShardAlignment = 16;      // elements: one row of a norm block (kernels.h), 64 bytes of fp32

struct ParameterSpec {
  std::string name;
  int64_t numel = 0;
  int64_t compute_itemsize = 4;  // bytes per element of the compute dtype: counts toward bucket_bytes
  int64_t master_itemsize = 4;   // 4 (fp32) or 8 (fp64); a bucket holds one kind only
};

struct Range {  // [begin, end)
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Range&) const = default;
};

// Where a parameter lies in its bucket.
struct Placement {
  int64_t parameter = 0;  // index into the agreed list
  int64_t offset = 0;     // elements from the start of the bucket
  int64_t numel = 0;
};

struct BucketPlan {
  std::vector<Placement> placements;  // in order of offset
  int64_t master_itemsize = 4;
  int64_t padded = 0;  // P: a multiple of world * kShardAlignment
  int64_t shard = 0;   // S = P / world
  Range shard_range(int rank) const { return {shard * rank, shard * (rank + 1)}; }
};

// The part of one parameter that one rank owns.
struct Piece {
  Range in_parameter;        // elements of the parameter
  int64_t shard_offset = 0;  // elements from the start of this rank's shard of the bucket
};

struct ShardPlan {
  int world = 1;
  std::vector<ParameterSpec> parameters;
  std::vector<BucketPlan> buckets;    // in the order in which they are reduced
  std::vector<int64_t> bucket_of;     // parameter -> bucket
  std::vector<int64_t> placement_of;  // parameter -> index in its bucket's placements
  // An empty range (at the clamped position) when the rank owns nothing of it.
  Piece piece(int64_t parameter, int rank) const;
  int64_t shard_elements() const;   // sum of S over buckets
  int64_t padded_elements() const;  // sum of P over buckets
};

// Buckets are filled in reverse order of the list (gradients come roughly in that order) up to bucket_bytes of compute
// dtype; a parameter larger than that has a bucket of its own; a change of master_itemsize starts a new bucket.
// Throws std::invalid_argument for world < 1, bucket_bytes < 1, a negative numel, an itemsize that is not 1, 2, 4 or 8,
// or a total that does not fit in 62 bits of bytes.
ShardPlan make_shard_plan(std::vector<ParameterSpec> parameters, int world, int64_t bucket_bytes);

// FNV-1a (64-bit) over a canonical byte form: equal digests on all ranks before anything moves.
uint64_t digest(const ShardPlan& plan);
uint64_t digest(const void* data, int64_t bytes, uint64_t seed = 14695981039346656037ull);

}  // namespace trueshard::plan
