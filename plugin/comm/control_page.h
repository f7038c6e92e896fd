// SPDX-License-Identifier: BSD-3-Clause
// Role: the page that all ranks of a group share first: the group's failure, who has left, and what each rank announces
// when memory is allocated.
// Invariants: I1 the first failure wins and its text never changes. I2 allocation n uses announcement n % 2; a rank
// starts allocation n + 1 only after everybody has read n, so n + 2 never overwrites what is being read. I3 plain data
// only: it lives in memory of other processes. I4 all-zero memory is a valid empty page. Threads: as noted at the
// members. Errors: none.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "plugin/comm/segments.h"
#include "plugin/comm/waiter.h"

namespace trueshard::comm {

struct Announcement {
  SegmentTicket ticket;
  char name[96];
  char error[160];       // why this rank could not make its own segment; empty: it did
  char open_error[160];  // why this rank could not open a peer's
};

struct RankLine {
  Flag joined;     // 1: has mapped the page
  Flag published;  // number of the last announcement
  Flag opened;     // number of the last allocation whose segments this rank has opened
  Announcement announcements[2];
  alignas(128) std::atomic<uint32_t> left;  // 1: released its transport
};

class ControlPage {
 public:
  static size_t bytes(int size) { return sizeof(ControlPage) + sizeof(RankLine) * static_cast<size_t>(size); }
  RankLine& line(int rank) { return reinterpret_cast<RankLine*>(this + 1)[rank]; }

  bool failed() const noexcept { return state_.load(std::memory_order_acquire) != kFine; }
  // False when another failure was first.
  bool fail(int rank, const std::string& text) noexcept;
  // Who reported the failure, and what. Only after failed().
  std::string failure_text(int* reporter) const;

 private:
  enum : uint32_t { kFine = 0, kWriting = 1, kFailed = 2 };
  alignas(128) std::atomic<uint32_t> state_;
  int32_t reporter_;
  char text_[3952];
};

}  // namespace trueshard::comm
