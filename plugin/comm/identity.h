// SPDX-License-Identifier: BSD-3-Clause
// Role: who a rank is: which host, which process. Ranks tell one another at start, and choose by it how to share
// memory. Invariants: I1 the token is unique to a running process (a forked child gets its own). I2 encode/decode are
// inverse. Threads: all functions may be called from any thread. Errors: c10::Error when /proc cannot be read or a text
// is malformed.
#pragma once
#include <cstdint>
#include <string>

#include "plugin/comm/segments.h"

namespace trueshard::comm {

struct Identity {
  std::string boot_id, hostname, token;
  int64_t pid = 0;
  int64_t start_time = 0;  // clock ticks after boot, from /proc/<pid>/stat
  uint64_t pid_namespace = 0;
  SegmentTicket probe;  // a segment that peers try to open; rank 0's is the control page

  bool same_host(const Identity& other) const { return boot_id == other.boot_id && hostname == other.hostname; }
  bool same_process(const Identity& other) const {
    return same_host(other) && pid == other.pid && start_time == other.start_time && token == other.token;
  }
  std::string encode() const;
  static Identity decode(const std::string& text);
};

Identity this_process();
// The start time of a process, or -1 when there is none (or it has ended and only waits to be collected).
int64_t process_start_time(int64_t pid);

}  // namespace trueshard::comm
