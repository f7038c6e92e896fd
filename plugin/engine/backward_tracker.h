// SPDX-License-Identifier: BSD-3-Clause
// Role: finds out, from gradient hooks alone, where a backward pass begins and ends, for all optimizers of one rank in
// one group. Invariants: I1 an outer backward call is one pass; passes nested in it (recomputation) belong to it. I2
// all optimizers that
//             a backward reached end their pass together, in order of creation, after the whole backward: so that ranks
//             whose hooks fire in another order do not wait for each other in a circle. I3 a backward that ended by an
//             exception is noticed at the next event: its graph task, which owns a token, is gone.
// Threads: one backward at a time per rank and group. Errors: those of the members; all members are ended before the
// first error is thrown.
#pragma once
#include <memory>
#include <vector>

#include "plugin/comm/transport.h"

namespace trueshard::engine {

class BackwardMember {
 public:
  virtual ~BackwardMember() = default;
  virtual void end_pass() = 0;      // all gradients of the pass are there
  virtual void abandon_pass() = 0;  // the backward was left by an exception
};

class BackwardTracker {
 public:
  // One per transport, shared by the optimizers over it.
  static std::shared_ptr<BackwardTracker> of(const std::shared_ptr<comm::Transport>& transport);

  int next_number() { return created_++; }  // numbers optimizers in order of creation, alike on all ranks
  void add(BackwardMember* member);
  void remove(BackwardMember* member);
  size_t members() const { return members_.size(); }
  // Called from a gradient hook: the member takes part in the running backward. True when this begins its pass.
  bool enter(BackwardMember* member);
  // Called outside a backward: ends passes whose backward is gone.
  void close_abandoned();

 private:
  void open();
  void leave_task();
  void end();
  static void queue_end(std::weak_ptr<BackwardTracker> tracker, std::shared_ptr<int> token);

  std::weak_ptr<BackwardTracker> self_;
  int created_ = 0;
  std::vector<BackwardMember*> members_;  // in order of creation
  std::vector<BackwardMember*> open_;     // those in the running backward
  std::weak_ptr<int> token_;              // alive while the running backward is
};

}  // namespace trueshard::engine
