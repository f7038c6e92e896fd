// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/shard_plan.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace trueshard::plan {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 62;  // exclusive; leaves room to add two such numbers

// value >= 0 and value + multiple must fit; callers are bounded by kMaxBytes
int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool valid_itemsize(int64_t itemsize) { return itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8; }

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument("trueshard plan: " + text); }

void check_spec(const ParameterSpec& spec) {
  if (spec.numel < 0) {
    fail("parameter '" + spec.name + "' has " + std::to_string(spec.numel) +
         " elements, expected 0 or more; pass tensor.numel()");
  }
  for (const auto& [what, itemsize] :
       {std::pair{"compute", spec.compute_itemsize}, std::pair{"master", spec.master_itemsize}}) {
    if (!valid_itemsize(itemsize)) {
      fail("parameter '" + spec.name + "' has a " + what + " itemsize of " + std::to_string(itemsize) +
           " bytes, expected 1, 2, 4 or 8; cast it to a real dtype first");
    }
  }
}

// Adds up bytes and refuses before anything can overflow.
class ByteTotal {
 public:
  void add(const std::string& what, int64_t elements, int64_t itemsize) {
    // elements <= bound / itemsize makes the product, and its sum with total_ < kMaxBytes, fit in 63 bits
    if (elements > (kMaxBytes - 1) / itemsize || elements * itemsize > kMaxBytes - 1 - total_) {
      fail("the parameters take more than 62 bits of bytes, reached at " + what + " with " + std::to_string(elements) +
           " elements of " + std::to_string(itemsize) +
           " bytes; expected less than 2^62 in all, shard a smaller module");
    }
    total_ += elements * itemsize;
  }

 private:
  int64_t total_ = 0;
};

class Packer {
 public:
  Packer(ShardPlan& plan, int64_t bucket_bytes) : plan_(plan), bucket_bytes_(bucket_bytes) {}

  void add(int64_t parameter) {
    const ParameterSpec& spec = plan_.parameters[parameter];
    const int64_t itemsize = std::max(spec.compute_itemsize, spec.master_itemsize);
    total_.add("parameter '" + spec.name + "'", spec.numel, itemsize);
    const int64_t bytes = spec.numel * spec.compute_itemsize;
    if (open_ && (bytes > bucket_bytes_ - bytes_ || spec.master_itemsize != plan_.buckets.back().master_itemsize))
      close();
    if (!open_) {
      plan_.buckets.emplace_back();
      plan_.buckets.back().master_itemsize = spec.master_itemsize;
      open_ = true;
    }
    BucketPlan& bucket = plan_.buckets.back();
    const int64_t offset = round_up(end_, kParameterAlignment);
    plan_.bucket_of[parameter] = static_cast<int64_t>(plan_.buckets.size()) - 1;
    plan_.placement_of[parameter] = static_cast<int64_t>(bucket.placements.size());
    bucket.placements.push_back({parameter, offset, spec.numel});
    total_.add("the padding of parameter '" + spec.name + "'", offset - end_, itemsize);
    end_ = offset + spec.numel;
    bytes_ += bytes;  // at most bucket_bytes, or one parameter's bytes
  }

  // An empty parameter at the end may lie at `padded`, never beyond it.
  void close() {
    if (!open_) return;
    BucketPlan& bucket = plan_.buckets.back();
    bucket.padded = round_up(end_, plan_.world * kShardAlignment);
    bucket.shard = bucket.padded / plan_.world;
    int64_t itemsize = bucket.master_itemsize;
    for (const Placement& placement : bucket.placements) {
      itemsize = std::max(itemsize, plan_.parameters[placement.parameter].compute_itemsize);
    }
    total_.add("the padding of bucket " + std::to_string(plan_.buckets.size() - 1), bucket.padded - end_, itemsize);
    open_ = false;
    end_ = 0;
    bytes_ = 0;
  }

 private:
  ShardPlan& plan_;
  int64_t bucket_bytes_;
  ByteTotal total_;
  bool open_ = false;
  int64_t end_ = 0;    // first free element of the open bucket
  int64_t bytes_ = 0;  // compute bytes in the open bucket, padding not counted
};

class Fnv {
 public:
  explicit Fnv(uint64_t seed) : hash_(seed) {}
  void byte(uint8_t value) { hash_ = (hash_ ^ value) * 1099511628211ull; }
  void bytes(const void* data, int64_t count) {
    const auto* p = static_cast<const uint8_t*>(data);
    for (int64_t i = 0; i < count; ++i) byte(p[i]);
  }
  void number(int64_t value) {  // little endian on every machine
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<uint8_t>(static_cast<uint64_t>(value) >> shift));
  }
  void text(const std::string& value) {  // the length first: "ab","c" is not "a","bc"
    number(static_cast<int64_t>(value.size()));
    bytes(value.data(), static_cast<int64_t>(value.size()));
  }
  void numbers(const std::vector<int64_t>& values) {
    number(static_cast<int64_t>(values.size()));
    for (int64_t value : values) number(value);
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_;
};

}  // namespace

Piece ShardPlan::piece(int64_t parameter, int rank) const {
  if (parameter < 0 || parameter >= static_cast<int64_t>(parameters.size())) {
    fail("piece of parameter " + std::to_string(parameter) + ", expected 0 to " + std::to_string(parameters.size()) +
         " (exclusive); the index is into the agreed list");
  }
  if (rank < 0 || rank >= world) {
    fail("piece for rank " + std::to_string(rank) + ", expected 0 to " + std::to_string(world) +
         " (exclusive); the plan was made for that world");
  }
  const BucketPlan& bucket = buckets[bucket_of[parameter]];
  const Placement& placement = bucket.placements[placement_of[parameter]];
  const Range shard = bucket.shard_range(rank);
  Piece piece;
  piece.in_parameter.begin = std::clamp<int64_t>(shard.begin - placement.offset, 0, placement.numel);
  piece.in_parameter.end = std::clamp<int64_t>(shard.end - placement.offset, 0, placement.numel);
  piece.shard_offset = std::clamp<int64_t>(placement.offset + piece.in_parameter.begin - shard.begin, 0, bucket.shard);
  return piece;
}

int64_t ShardPlan::shard_elements() const {
  int64_t sum = 0;
  for (const BucketPlan& bucket : buckets) sum += bucket.shard;
  return sum;
}

int64_t ShardPlan::padded_elements() const {
  int64_t sum = 0;
  for (const BucketPlan& bucket : buckets) sum += bucket.padded;
  return sum;
}

ShardPlan make_shard_plan(std::vector<ParameterSpec> parameters, int world, int64_t bucket_bytes) {
  if (world < 1) fail("world is " + std::to_string(world) + ", expected 1 or more; pass the size of the process group");
  if (bucket_bytes < 1) {
    fail("bucket_bytes is " + std::to_string(bucket_bytes) + ", expected 1 or more; leave the option at its default");
  }
  for (const ParameterSpec& spec : parameters) check_spec(spec);
  ShardPlan plan;
  plan.world = world;
  plan.parameters = std::move(parameters);
  plan.bucket_of.assign(plan.parameters.size(), 0);
  plan.placement_of.assign(plan.parameters.size(), 0);
  Packer packer(plan, bucket_bytes);
  for (int64_t i = static_cast<int64_t>(plan.parameters.size()) - 1; i >= 0; --i) packer.add(i);
  packer.close();
  return plan;
}

uint64_t digest(const ShardPlan& plan) {
  Fnv fnv(14695981039346656037ull);
  fnv.number(plan.world);
  fnv.number(static_cast<int64_t>(plan.parameters.size()));
  for (const ParameterSpec& spec : plan.parameters) {
    fnv.text(spec.name);
    fnv.number(spec.numel);
    fnv.number(spec.compute_itemsize);
    fnv.number(spec.master_itemsize);
  }
  fnv.number(static_cast<int64_t>(plan.buckets.size()));
  for (const BucketPlan& bucket : plan.buckets) {
    fnv.number(static_cast<int64_t>(bucket.placements.size()));
    for (const Placement& placement : bucket.placements) {
      fnv.number(placement.parameter);
      fnv.number(placement.offset);
      fnv.number(placement.numel);
    }
    fnv.number(bucket.master_itemsize);
    fnv.number(bucket.padded);
    fnv.number(bucket.shard);
  }
  fnv.numbers(plan.bucket_of);
  fnv.numbers(plan.placement_of);
  return fnv.value();
}

uint64_t digest(const void* data, int64_t bytes, uint64_t seed) {
  Fnv fnv(seed);
  fnv.bytes(data, bytes);
  return fnv.value();
}

}  // namespace trueshard::plan
