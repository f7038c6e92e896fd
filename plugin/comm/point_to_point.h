// SPDX-License-Identifier: BSD-3-Clause
// Role: send, recv and recv-from-any over a Mailbox. A send is offered first and its bytes travel once the other rank
// has a matching receive, so that nothing is buffered beyond the rings and tags may match in any order. Invariants: I1
// transfers of one pair of ranks with one tag match in the order of the calls. I2 transfers make progress on a thread
// of their own, beside the collectives and whatever their caller does; the thread exists from the first transfer on. I3
// sizes or dtypes that differ are an error on both ranks, and nothing was written. I4 a send ends when its memory may
// be used again: its bytes are on their way. Threads: one caller at a time, as c10d. Errors: in the work. A peer that
// is gone, or late beyond the timeout, fails the group.
#pragma once
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "plugin/comm/tensors.h"
#include "plugin/comm/transport.h"
#include "plugin/comm/work.h"

namespace trueshard::comm {

constexpr int kAnyRank = -1;

struct Transfer {
  enum class Kind { kSend, kReceive };
  Kind kind = Kind::kSend;
  c10::intrusive_ptr<CollectiveWork> work;
  std::optional<DenseTensor> memory;  // none where it is refused
  int peer = kAnyRank;
  int32_t tag = 0;
  int64_t bytes = 0, elements = 0;
  uint32_t dtype = 0;
  std::string refusal;      // not empty: why this rank cannot
  int64_t start_ns = 0;     // set by start()
  int64_t deadline_ns = 0;  // set by start()
};

class PointToPoint {
 public:
  explicit PointToPoint(std::shared_ptr<Transport> transport);  // collective
  ~PointToPoint();
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;
  void start(Transfer transfer);
  void wait_until_complete();
  void stop(std::exception_ptr error);  // what is under way ends with `error`, and whatever comes later
  void join();                          // after stop(): the thread has ended
  void abandon() noexcept;              // in a forked child, where the thread does not exist

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace trueshard::comm
