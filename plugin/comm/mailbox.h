// SPDX-License-Identifier: BSD-3-Clause
// Role: what two ranks tell one another outside the collectives: for every ordered pair of ranks a ring of letters and
// a ring of pieces of data, in memory of the writer; and for every rank a bell that whoever left something for it
// rings. Invariants: I1 letters and pieces of a pair arrive in order. I2 writing never waits: a full ring says so. I3
// whoever reads the bell's number before looking, and waits for the next one after finding nothing, misses nothing.
// Shapes: a piece is piece_bytes() long. Threads: one thread per rank reads and writes, any thread rings. Errors: none
// after construction, which is collective and throws as Transport::allocate().
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "plugin/comm/transport.h"
#include "plugin/comm/waiter.h"

namespace trueshard::comm {

struct Letter {
  enum class Kind : uint32_t {
    kOffer = 1,  // the writer has something to send
    kAccept,     // the reader of the offer `id` has a place for it
    kDecline     // it has not: its own sizes are in the letter
  };
  Kind kind = Kind::kOffer;
  int32_t tag = 0;
  uint64_t id = 0;
  int64_t bytes = 0, elements = 0;
  uint32_t dtype = 0;    // at::ScalarType + 1
  uint32_t refused = 0;  // 1: the writer cannot do its part, whatever the other can
};

class Mailbox {
 public:
  explicit Mailbox(const std::shared_ptr<Transport>& transport);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  bool write(int to, const Letter& letter);  // false: the ring is full
  bool read(int from, Letter* letter);       // false: nothing there
  int64_t piece_bytes() const { return piece_bytes_; }
  std::byte* piece_to_fill(int to);  // null: the ring is full
  void piece_filled(int to);
  const std::byte* piece_to_read(int from);  // null: nothing there
  void piece_was_read(int from);

  void ring(int rank) { comm::ring(bell(rank)); }
  Flag& bell(int rank) const;
  uint64_t rung() const;  // what this rank's bell shows

 private:
  struct Counters;  // of one ordered pair, in the memory of the one that counts
  Counters& counters(int owner, int other) const;
  std::byte* letters(int from, int to) const;
  std::byte* pieces(int from, int to) const;
  std::shared_ptr<Transport> transport_;
  int64_t piece_bytes_;
  std::shared_ptr<Region> region_;
};

}  // namespace trueshard::comm
