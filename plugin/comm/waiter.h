// SPDX-License-Identifier: BSD-3-Clause
// Role: sequence numbers that one rank raises and others wait for, in memory that all of them share.
// Waiting goes spin -> yield -> futex; each stage is used only while it pays (ranks that own their cores, ranks that
// share one, a busy neighbour from another program). What a thread has seen of its neighbours steers its later waits.
// Invariants: I1 what a rank wrote before post(seq) is visible to whoever saw reached(seq). I2 numbers only grow, and
// no
//             waiter lags by 2^30. I3 no system call where nobody sleeps and the number is there. I4 `give_up` is asked
//             at least every 100 ms of sleep.
// Shapes: one 128-byte line per flag (neighbouring 64-byte lines are fetched in pairs).
// Threads: one poster per flag, any number of waiters. Errors: none; a wait that was given up returns false.
#pragma once
#include <atomic>
#include <cstdint>

namespace trueshard::comm {

struct alignas(128) Flag {
  std::atomic<uint32_t> word{0};  // bit 0: somebody sleeps; bits 1..31: the number modulo 2^31
  std::atomic<int32_t> cpu{-1};   // where the poster last ran; a hint, may be stale
};
static_assert(sizeof(Flag) == 128);
static_assert(std::atomic<uint32_t>::is_always_lock_free, "the kernel reads the futex word as a plain 32-bit number");

inline bool reached_word(uint32_t word, uint64_t number) {
  return static_cast<int32_t>((word & ~1u) - (static_cast<uint32_t>(number) << 1)) >= 0;
}
inline bool reached(const Flag& flag, uint64_t number) {
  return reached_word(flag.word.load(std::memory_order_acquire), number);
}
void post(Flag& flag, uint64_t number);
// The next number, whoever rings: for flags that have several posters and are never post()ed.
void ring(Flag& flag);
// Lets sleepers look at their `give_up` again; changes no number.
void wake(Flag& flag);

class GiveUp {  // asked while a waiter sleeps; true ends the wait
 public:
  virtual bool operator()() = 0;

 protected:
  ~GiveUp() = default;
};

struct WaitLimits {
  int ranks_here = 1;       // ranks that run on this host
  int64_t deadline_ns = 0;  // observe::now_ns clock; give_up is asked soon after it (0: none)
};
// True when the number was reached, false when give_up() said so.
bool wait(Flag& flag, uint64_t number, const WaitLimits& limits, GiveUp& give_up);

// Asks the kernel for short time slices of the calling thread, so that it runs soon after a wake-up even beside a busy
// neighbour (Linux 6.12 or newer, no privilege; threads it creates inherit it). False when the kernel refused.
bool request_time_slice(int64_t microseconds);
// The slice for this library's own threads, in microseconds: TRUESHARD_TIME_SLICE_US, or 100 when it is not set.
int64_t worker_time_slice_us();

}  // namespace trueshard::comm
