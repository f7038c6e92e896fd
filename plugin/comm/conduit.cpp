// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/conduit.h"

#include <algorithm>
#include <cstring>

#include "plugin/comm/conduit_sizes.h"
#include "plugin/comm/errors.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

// NaN-fills what is about to be written, for those who test under TRUESHARD_CHAOS; never what is still to be read.
void poison(std::byte* output, int64_t bytes, const std::byte* input, int64_t input_bytes) {
  const bool apart = output + bytes <= input || input + input_bytes <= output;
  if (apart || input == nullptr) observe::chaos_poison(output, static_cast<size_t>(bytes));
}

void poison_piece(const Conduit::Pieces& pieces, size_t rank) {
  for (size_t i = 0; i < pieces.inputs.size(); ++i) {
    const std::byte* begin = pieces.inputs[i];
    const std::byte* output = pieces.outputs[rank];
    if (output < begin + pieces.input_bytes[i] && begin < output + pieces.output_bytes[rank]) return;
  }
  observe::chaos_poison(pieces.outputs[rank], static_cast<size_t>(pieces.output_bytes[rank]));
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, static_cast<size_t>(bytes));
}

}  // namespace

Conduit::Conduit(const std::shared_ptr<Transport>& transport)
    : channel_(transport, "collectives", {sizeof(int64_t) * 2 * static_cast<size_t>(transport->size()), kSlots, false}),
      staging_(transport->allocate("staging", static_cast<size_t>(kSlots * kSlotBytes))),
      reducer_(transport->size()),
      operands_(static_cast<size_t>(transport->size())) {}

std::byte* Conduit::own_slot(uint64_t seq) {
  if (seq > static_cast<uint64_t>(kSlots)) channel_.wait_all_read(seq - static_cast<uint64_t>(kSlots));
  return staging_->data(channel_.rank()) + slot_offset(seq);
}

const std::byte* Conduit::slot(int rank, uint64_t seq) const { return staging_->data(rank) + slot_offset(seq); }

void Conduit::await(const CollectiveCall& call, Await whom, uint64_t seq) {
  if (whom == Await::kAll) channel_.wait_all_posted(seq);
  if (whom == Await::kRoot) channel_.wait_posted(call.fingerprint.root, seq);
}

void Conduit::run(const CollectiveCall& call, const Pipeline& pipeline, const void* record, size_t record_bytes) {
  channel_.set_wait_limit(call.timeout);
  const uint64_t first = channel_.next();
  pipeline.fill(0, own_slot(first));
  channel_.post(call.fingerprint, record, record_bytes);
  channel_.wait_all_posted(first);  // a mismatch ends here: one message, nothing written, on every rank
  const int64_t chunks = pipeline.agree ? pipeline.agree(first) : pipeline.chunks;
  Fingerprint later = call.fingerprint;
  for (int64_t k = 0; k < chunks; ++k) {
    const uint64_t seq = first + static_cast<uint64_t>(k);
    if (k + 1 < chunks) {
      pipeline.fill(k + 1, own_slot(seq + 1));
      later.bucket = k + 1;
      channel_.post(later);
    }
    if (k > 0) await(call, pipeline.await, seq);
    pipeline.drain(k, seq);
    channel_.done_reading(seq);
  }
}

void Conduit::all_gather(const CollectiveCall& call, const std::byte* input, const std::vector<std::byte*>& outputs,
                         int64_t bytes) {
  const int64_t chunk = chunk_bytes(bytes);
  const auto fill = [&](int64_t k, std::byte* slot) { copy_bytes(slot, input + k * chunk, part(bytes, chunk, k)); };
  const auto drain = [&](int64_t k, uint64_t seq) {
    for (size_t r = 0; r < world(); ++r) {
      if (k == 0) poison(outputs[r], bytes, input, bytes);
      const std::byte* source = r == self() ? input + k * chunk : slot(static_cast<int>(r), seq);
      copy_bytes(outputs[r] + k * chunk, source, part(bytes, chunk, k));
    }
  };
  run(call, {chunks_of(bytes, chunk), Await::kAll, fill, drain, {}});
}

void Conduit::broadcast(const CollectiveCall& call, std::byte* data, int64_t bytes) {
  const bool root = channel_.rank() == call.fingerprint.root;
  const int64_t chunk = chunk_bytes(bytes);
  const auto fill = [&](int64_t k, std::byte* slot) {
    if (root) copy_bytes(slot, data + k * chunk, part(bytes, chunk, k));
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    if (root) return;
    if (k == 0) poison(data, bytes, nullptr, 0);
    copy_bytes(data + k * chunk, slot(call.fingerprint.root, seq), part(bytes, chunk, k));
  };
  run(call, {chunks_of(bytes, chunk), root ? Await::kNobody : Await::kRoot, fill, drain, {}});
}

void Conduit::gather(const CollectiveCall& call, const std::byte* input, const std::vector<std::byte*>& outputs,
                     int64_t bytes) {
  const bool root = channel_.rank() == call.fingerprint.root;
  const int64_t chunk = chunk_bytes(bytes);
  const auto fill = [&](int64_t k, std::byte* slot) {
    if (!root) copy_bytes(slot, input + k * chunk, part(bytes, chunk, k));
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    if (!root) return;
    for (size_t r = 0; r < world(); ++r) {
      if (k == 0) poison(outputs[r], bytes, input, bytes);
      const std::byte* source = r == self() ? input + k * chunk : slot(static_cast<int>(r), seq);
      copy_bytes(outputs[r] + k * chunk, source, part(bytes, chunk, k));
    }
  };
  run(call, {chunks_of(bytes, chunk), root ? Await::kAll : Await::kNobody, fill, drain, {}});
}

void Conduit::scatter(const CollectiveCall& call, const std::vector<const std::byte*>& inputs, std::byte* output,
                      int64_t bytes) {
  const bool root = channel_.rank() == call.fingerprint.root;
  const int64_t chunk = piece_bytes(bytes, channel_.size());
  const auto fill = [&](int64_t k, std::byte* slot) {
    if (!root) return;
    for (size_t r = 0; r < world(); ++r) {
      if (r != self()) copy_bytes(slot + static_cast<int64_t>(r) * chunk, inputs[r] + k * chunk, part(bytes, chunk, k));
    }
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    if (root) {
      if (k == 0) poison(output, bytes, inputs[self()], bytes);
      copy_bytes(output + k * chunk, inputs[self()] + k * chunk, part(bytes, chunk, k));
      return;
    }
    if (k == 0) poison(output, bytes, nullptr, 0);
    const std::byte* source = slot(call.fingerprint.root, seq) + static_cast<int64_t>(self()) * chunk;
    copy_bytes(output + k * chunk, source, part(bytes, chunk, k));
  };
  run(call, {chunks_of(bytes, chunk), root ? Await::kNobody : Await::kRoot, fill, drain, {}});
}

// All ranks compare what every pair sends and expects, so that all see the same mismatch; gives the number of chunks.
int64_t Conduit::exchange_sizes(const CollectiveCall& call, uint64_t first, int64_t chunk) const {
  const auto sizes = [&](size_t r) {
    return reinterpret_cast<const int64_t*>(channel_.record(static_cast<int>(r), first));
  };
  int64_t chunks = 1;
  for (size_t from = 0; from < world(); ++from) {
    for (size_t to = 0; to < world(); ++to) {
      const int64_t sent = sizes(from)[to], expected = sizes(to)[world() + from];
      if (sent != expected) {
        throw_backend_error(where(channel_.rank(), channel_.size(), transport().group_name()) + " " +
                            call.fingerprint.operation + ": rank " + std::to_string(from) + " sends " +
                            std::to_string(sent) + " bytes to rank " + std::to_string(to) + ", which expects " +
                            std::to_string(expected) + "; input splits and output splits must match");
      }
      chunks = std::max(chunks, chunks_of(sent, chunk));
    }
  }
  return chunks;
}

void Conduit::all_to_all(const CollectiveCall& call, const Pieces& pieces) {
  const int64_t chunk = piece_bytes(kLargestPiece, channel_.size());
  std::vector<int64_t> record = pieces.input_bytes;
  record.insert(record.end(), pieces.output_bytes.begin(), pieces.output_bytes.end());
  const auto fill = [&](int64_t k, std::byte* slot) {
    for (size_t r = 0; r < world(); ++r) {
      if (r == self()) continue;
      copy_bytes(slot + static_cast<int64_t>(r) * chunk, pieces.inputs[r] + k * chunk,
                 part(pieces.input_bytes[r], chunk, k));
    }
  };
  const auto drain = [&](int64_t k, uint64_t seq) {
    for (size_t r = 0; r < world(); ++r) {
      const std::byte* source = r == self() ? pieces.inputs[r] + k * chunk
                                            : slot(static_cast<int>(r), seq) + static_cast<int64_t>(self()) * chunk;
      if (k == 0) poison_piece(pieces, r);
      copy_bytes(pieces.outputs[r] + k * chunk, source, part(pieces.output_bytes[r], chunk, k));
    }
  };
  const auto agree = [&](uint64_t first) -> int64_t {
    try {
      return exchange_sizes(call, first, chunk);
    } catch (const c10::DistBackendError&) {
      channel_.done_reading(first);
      throw;
    }
  };
  run(call, {1, Await::kAll, fill, drain, agree}, record.data(), record.size() * sizeof(int64_t));
}

void Conduit::barrier(const CollectiveCall& call) {
  run(call, {1, Await::kAll, [](int64_t, std::byte*) {}, [](int64_t, uint64_t) {}, {}});
}

void Conduit::refuse(const CollectiveCall& call) {
  CollectiveCall refusal = call;
  refusal.fingerprint = Fingerprint::of((std::string("refused ") + call.fingerprint.operation).c_str());
  try {
    barrier(refusal);
  } catch (const c10::DistBackendError&) {
    // The others run it, or refuse something else: the mismatch is their error. A failed group is ours.
    if (transport().failed()) throw;
  }
}

}  // namespace trueshard::comm
