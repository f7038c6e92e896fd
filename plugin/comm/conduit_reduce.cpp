// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cstring>

#include "plugin/comm/conduit.h"
#include "plugin/comm/conduit_sizes.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

// Up to here every rank reduces everything: cheaper than a second meeting.
constexpr int64_t kDirectBytes = 32768;

int64_t item_bytes(const CollectiveCall& call) { return static_cast<int64_t>(c10::elementSize(call.spec.dtype)); }

}  // namespace

void Conduit::all_reduce(const CollectiveCall& call, std::byte* data, int64_t elements) {
  // With two ranks both ways read the same bytes of the other.
  if (channel_.size() <= 2 || elements * item_bytes(call) <= kDirectBytes) {
    all_reduce_direct(call, data, elements);
  } else {
    all_reduce_in_parts(call, data, elements);
  }
}

void Conduit::all_reduce_direct(const CollectiveCall& call, std::byte* data, int64_t elements) {
  const int64_t chunk = chunk_elements(elements), item = item_bytes(call);
  const auto fill = [&](int64_t k, std::byte* slot) {
    const int64_t count = part(elements, chunk, k);
    if (count > 0) std::memcpy(slot, data + k * chunk * item, static_cast<size_t>(count * item));
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    for (size_t r = 0; r < world(); ++r) operands_[r] = slot(static_cast<int>(r), seq);
    std::byte* here = data + k * chunk * item;
    operands_[self()] = here;
    reducer_.reduce(call.spec, {operands_.data(), here, part(elements, chunk, k)});
  };
  run(call, {chunks_of(elements, chunk), Await::kAll, fill, drain, {}});
}

// Message m brings chunk m of every rank's data and, behind it, this rank's part of the reduced chunk m - 1. A step:
// copy chunk m in, reduce the own part of chunk m - 1, post both, copy chunk m - 2 out of everybody's parts.
void Conduit::all_reduce_in_parts(const CollectiveCall& call, std::byte* data, int64_t elements) {
  channel_.set_wait_limit(call.timeout);
  const int64_t chunk = chunk_elements(elements), item = item_bytes(call), chunks = chunks_of(elements, chunk);
  const auto ranks = static_cast<int64_t>(world());
  const auto count = [&](int64_t m) { return part(elements, chunk, m); };
  // Parts start at multiples of 64 elements of the chunk.
  const auto part_size = [&](int64_t m) { return (count(m) + 64 * ranks - 1) / (64 * ranks) * 64; };
  const auto part_count = [&](int64_t m, int64_t r) {
    return std::clamp<int64_t>(count(m) - r * part_size(m), 0, part_size(m));
  };
  const uint64_t first = channel_.next();
  Fingerprint fingerprint = call.fingerprint;
  for (int64_t m = 0; m <= chunks + 1; ++m) {
    const uint64_t seq = first + static_cast<uint64_t>(m);
    if (m <= chunks) {
      std::byte* own = own_slot(seq);
      if (m < chunks) std::memcpy(own, data + m * chunk * item, static_cast<size_t>(count(m) * item));
    }
    if (m >= 1) channel_.wait_all_posted(seq - 1);  // m = 1 compares the fingerprints before anything is written
    if (m >= 1 && m <= chunks) {
      const int64_t begin = static_cast<int64_t>(self()) * part_size(m - 1) * item;
      for (size_t r = 0; r < world(); ++r) operands_[r] = slot(static_cast<int>(r), seq - 1) + begin;
      std::byte* result = staging_->data(channel_.rank()) + slot_offset(seq) + kSlotInput;
      reducer_.reduce(call.spec, {operands_.data(), result, part_count(m - 1, static_cast<int64_t>(self()))});
    }
    if (m <= chunks) {
      if (m > 0) fingerprint.bucket = m;
      channel_.post(fingerprint);
    }
    if (m >= 2) {
      for (int64_t r = 0; r < ranks; ++r) {
        const int64_t bytes = part_count(m - 2, r) * item;
        if (bytes == 0) continue;
        std::byte* to = data + ((m - 2) * chunk + r * part_size(m - 2)) * item;
        std::memcpy(to, slot(static_cast<int>(r), seq - 1) + kSlotInput, static_cast<size_t>(bytes));
      }
    }
    if (m >= 1) channel_.done_reading(seq - 1);
  }
}

void Conduit::reduce(const CollectiveCall& call, std::byte* data, int64_t elements) {
  const bool root = channel_.rank() == call.fingerprint.root;
  const int64_t chunk = chunk_elements(elements), item = item_bytes(call);
  const auto fill = [&](int64_t k, std::byte* slot) {
    const int64_t count = part(elements, chunk, k);
    if (!root && count > 0) std::memcpy(slot, data + k * chunk * item, static_cast<size_t>(count * item));
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    if (!root) return;
    for (size_t r = 0; r < world(); ++r) operands_[r] = slot(static_cast<int>(r), seq);
    std::byte* here = data + k * chunk * item;
    operands_[self()] = here;
    reducer_.reduce(call.spec, {operands_.data(), here, part(elements, chunk, k)});
  };
  run(call, {chunks_of(elements, chunk), root ? Await::kAll : Await::kNobody, fill, drain, {}});
}

void Conduit::reduce_scatter(const CollectiveCall& call, const std::vector<const std::byte*>& inputs, std::byte* output,
                             int64_t elements) {
  const int64_t item = item_bytes(call), ranks = static_cast<int64_t>(world());
  const int64_t chunk = std::max<int64_t>(64, chunk_elements(elements * ranks) / ranks / 64 * 64);
  const auto fill = [&](int64_t k, std::byte* slot) {
    const int64_t bytes = part(elements, chunk, k) * item;
    for (int64_t r = 0; r < ranks && bytes > 0; ++r) {
      std::memcpy(slot + r * chunk * item, inputs[static_cast<size_t>(r)] + k * chunk * item,
                  static_cast<size_t>(bytes));
    }
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    const int64_t piece = static_cast<int64_t>(self()) * chunk * item;
    for (size_t r = 0; r < world(); ++r) operands_[r] = slot(static_cast<int>(r), seq) + piece;
    std::byte* here = output + k * chunk * item;
    const int64_t count = part(elements, chunk, k);
    observe::chaos_poison(here, static_cast<size_t>(count * item));
    reducer_.reduce(call.spec, {operands_.data(), here, count});
  };
  run(call, {chunks_of(elements, chunk), Await::kAll, fill, drain, {}});
}

}  // namespace trueshard::comm
