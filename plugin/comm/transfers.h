// SPDX-License-Identifier: BSD-3-Clause
// Role: the transfers of one rank that are under way: matches offers with receives and moves pieces of data.
// Invariants: I1 step() never waits. I2 the data of accepted offers of one rank arrive in the order of the acceptances.
// Threads: one. Errors: none thrown; they end the transfer's work.
#pragma once
#include <deque>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "plugin/comm/mailbox.h"
#include "plugin/comm/point_to_point.h"

namespace trueshard::comm {

class Transfers {
 public:
  Transfers(const std::shared_ptr<Transport>& transport, Mailbox& mailbox);
  void add(Transfer transfer);
  bool step();                  // does what can be done; false when that was nothing
  bool empty() const;           // nothing is under way, and all letters were written
  void forget_gone() noexcept;  // letters that nobody will read
  int64_t next_deadline_ns() const;
  // Why the group has to fail: a transfer is late, or its other rank is gone. Empty: it has not.
  std::string problem() const;
  void end_all(const std::exception_ptr& error);

 private:
  struct Moving {
    Transfer transfer;
    int64_t offset = 0;
  };
  struct Peer {
    std::deque<Letter> outbox;             // not yet written
    std::map<uint64_t, Transfer> offered;  // by the offer's id
    std::deque<Letter> offers;             // of the peer, for which there is no receive yet
    std::deque<Moving> sending, receiving;
  };
  std::string here(const Transfer& transfer) const;
  void match(Transfer receive);
  void take(int from, const Letter& letter);
  void accept(int from, const Letter& offer, Transfer receive);
  void begin_sending(int to, const Letter& letter);
  bool push(int to);
  bool pull(int from);
  void finish(Transfer& transfer, const std::exception_ptr& error);
  std::string complaint(const Transfer& transfer, int peer, int64_t now_ns) const;
  template <class Visitor>
  void visit(const Visitor& visitor) const;

  Transport& transport_;
  Mailbox& mailbox_;
  std::vector<Peer> peers_;
  std::list<Transfer> posted_;   // receives without an offer, in the order of the calls
  std::deque<int> offer_order_;  // ranks whose offers wait, in order of arrival: what recv-from-any takes first
  uint64_t next_id_ = 1;
  int64_t count_ = 0;
};

}  // namespace trueshard::comm
