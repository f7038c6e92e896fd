// SPDX-License-Identifier: BSD-3-Clause
// Role: the collectives over dense memory: one channel, and a staging area of four slots per rank through which large
// arrays pass chunk by chunk, so that copying in, reducing and copying out of neighbouring chunks overlap between
// ranks. Invariants: I1 no output is written before the fingerprints of all ranks were seen to agree. I2 slot seq % 4
// belongs to message seq until all ranks have read it. I3 the order of additions is the tree over ranks, whatever the
// chunks. I4 an empty collective is one message like any other. Shapes: dense arrays; sizes are 64-bit. Threads: one
// caller at a time. Errors: c10::DistBackendError; what is not a mismatch marks the group failed.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "plugin/comm/channel.h"
#include "plugin/comm/reduce_elements.h"

namespace trueshard::comm {

struct CollectiveCall {
  Fingerprint fingerprint;
  ReductionSpec spec;                    // reductions only
  std::chrono::milliseconds timeout{0};  // 0: the group's
};

class Conduit {
 public:
  explicit Conduit(const std::shared_ptr<Transport>& transport);
  Transport& transport() const { return channel_.transport(); }

  void all_reduce(const CollectiveCall& call, std::byte* data, int64_t elements);
  void reduce(const CollectiveCall& call, std::byte* data, int64_t elements);  // only the root's data change
  // inputs: one array of `elements` per rank.
  void reduce_scatter(const CollectiveCall& call, const std::vector<const std::byte*>& inputs, std::byte* output,
                      int64_t elements);
  void all_gather(const CollectiveCall& call, const std::byte* input, const std::vector<std::byte*>& outputs,
                  int64_t bytes);
  void broadcast(const CollectiveCall& call, std::byte* data, int64_t bytes);
  void gather(const CollectiveCall& call, const std::byte* input, const std::vector<std::byte*>& outputs,
              int64_t bytes);
  void scatter(const CollectiveCall& call, const std::vector<const std::byte*>& inputs, std::byte* output,
               int64_t bytes);
  struct Pieces {  // one piece for, or from, each rank; sizes in bytes
    std::vector<const std::byte*> inputs;
    std::vector<int64_t> input_bytes;
    std::vector<std::byte*> outputs;
    std::vector<int64_t> output_bytes;
  };
  void all_to_all(const CollectiveCall& call, const Pieces& pieces);
  void barrier(const CollectiveCall& call);
  // Takes part in the place of a collective that this rank's arguments make impossible, so that all ranks get an error
  // and stay in step; returns normally when the others have been told.
  void refuse(const CollectiveCall& call);

 private:
  enum class Await { kAll, kRoot, kNobody };  // whose messages, after the first, this rank needs
  struct Pipeline {
    int64_t chunks = 1;
    Await await = Await::kAll;
    c10::function_ref<void(int64_t chunk, std::byte* slot)> fill;
    c10::function_ref<void(int64_t chunk, uint64_t seq)> drain;
    c10::function_ref<int64_t(uint64_t first)> agree;  // after the first message: the number of chunks
  };
  void run(const CollectiveCall& call, const Pipeline& pipeline, const void* record = nullptr, size_t record_bytes = 0);
  void await(const CollectiveCall& call, Await whom, uint64_t seq);
  void all_reduce_direct(const CollectiveCall& call, std::byte* data, int64_t elements);
  void all_reduce_in_parts(const CollectiveCall& call, std::byte* data, int64_t elements);
  int64_t exchange_sizes(const CollectiveCall& call, uint64_t first, int64_t chunk) const;

  std::byte* own_slot(uint64_t seq);  // waits until all have read what was there
  const std::byte* slot(int rank, uint64_t seq) const;
  size_t self() const { return static_cast<size_t>(channel_.rank()); }
  size_t world() const { return static_cast<size_t>(channel_.size()); }

  Channel channel_;
  std::shared_ptr<Region> staging_;
  ElementReducer reducer_;
  std::vector<const void*> operands_;  // scratch, one per rank
};

}  // namespace trueshard::comm
