// SPDX-License-Identifier: BSD-3-Clause
// Role: one ordered conversation between all ranks of a group. Each rank posts numbered messages (a fingerprint, a
// small record and whatever bytes it has put into its own region before); every rank reads every peer's. There is no
// trailing barrier: a rank says separately up to which number it has finished reading, so that a slot can be used
// again. Invariants: I1 all ranks post the same sequence 1, 2, 3, ... I2 a message may be read from wait_posted(peer,
// seq) until this
//             rank's done_reading(seq). I3 a rank may reuse what message seq pointed at after wait_all_read(seq).
//             I4 fingerprints that differ are an error on all ranks, with the differing fields only. The message then
//             counts as read, and where every rank got the error (each compared with all peers: wait_all_posted)
//             the channel goes on with the next message. Any other error marks the group failed.
// Threads: one thread at a time per channel; different channels are independent. Errors: c10::DistBackendError; every
// wait ends within the group's timeout, a dead peer ends it within a second.
#pragma once
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "plugin/comm/transport.h"

namespace trueshard::comm {

// What a rank says it is doing. Fields that a call does not use stay 0. Compared field by field.
struct Fingerprint {
  char operation[40] = {};  // "allreduce", "reduce bucket", "finish reduction", ...
  uint32_t dtype = 0;       // at::ScalarType + 1, 0: none
  uint32_t reduction = 0;   // c10d::ReduceOp::RedOpType + 1, 0: none
  int32_t root = -1;
  uint32_t pass = 0;  // backward pass since zero_grad
  int64_t elements = 0;
  int64_t bucket = -1;
  uint64_t detail = 0;  // anything else that must agree (digest, divisor bits, scale bits)
  static Fingerprint of(const char* operation) {
    Fingerprint f;
    std::strncpy(f.operation, operation, sizeof f.operation - 1);
    return f;
  }
};
static_assert(std::is_trivially_copyable_v<Fingerprint>);

struct ChannelOptions {
  size_t record_bytes = 0;  // largest record a message carries, the same on all ranks
  int depth = 4;            // messages in flight: post(seq) first waits until everybody has read seq - depth
  bool trace = true;        // one trace line per message, from post to done_reading
};

class Channel {
 public:
  // Collective over the transport. `name` is unique in the group and appears in errors ("optimizer 0", "collectives").
  Channel(std::shared_ptr<Transport> transport, const std::string& name, ChannelOptions options);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Transport& transport() const { return *transport_; }
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

  // The number of the next message this rank will post (starts at 1).
  uint64_t next() const;
  // Posts the next message and returns its number. Bytes written to shared regions before are visible to whoever sees
  // it.
  uint64_t post(const Fingerprint& fingerprint, const void* record = nullptr, size_t record_bytes = 0);
  // Whether post() would have to wait for a slow reader.
  bool can_post() const;
  bool posted(int peer, uint64_t seq) const;  // does not wait
  bool all_posted(uint64_t seq) const;        // does not wait
  void wait_posted(int peer, uint64_t seq);   // also compares the fingerprint with this rank's own message seq
  void wait_all_posted(uint64_t seq);
  const std::byte* record(int peer, uint64_t seq) const;  // valid per I2
  void done_reading(uint64_t seq);                        // this rank has finished with all messages up to seq
  bool all_read(uint64_t seq) const;
  void wait_all_read(uint64_t seq);  // all peers; this rank's own reading is its own business

  // Waits of this channel end after `limit` (0: the transport's timeout).
  void set_wait_limit(std::chrono::milliseconds limit);
  // Seconds this rank has spent in waits that were not satisfied at once, and messages posted.
  double seconds_waited() const;
  uint64_t messages() const;

 private:
  struct State;
  std::shared_ptr<Transport> transport_;
  std::unique_ptr<State> state_;
};

}  // namespace trueshard::comm
