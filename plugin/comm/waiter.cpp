// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/waiter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trueshard::comm {
namespace {

constexpr int64_t kMicro = 1000, kMilli = 1000000;
constexpr int64_t kQuietSpin = 50 * kMicro;      // while no foreign thread was seen on our CPU
constexpr int64_t kContendedSpin = 20 * kMicro;  // upper limit otherwise; halves with every vain spin
constexpr int64_t kMinSpin = 2 * kMicro;
constexpr int64_t kYieldLimit = kMilli;
constexpr int64_t kHole = 500 * kMicro;  // longer off the CPU: a foreign thread had it
constexpr int kCheapYields = 64;         // a hole after so many cheap yields says nothing against yielding
constexpr int64_t kBackoff = 50 * kMilli, kBackoffMax = 200 * kMilli;
constexpr int64_t kSleepSlice = 100 * kMilli;

int64_t clock_ns() {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1000000000 + ts.tv_nsec;
}

void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(Flag& flag, int operation, uint32_t value, const timespec* timeout) {
  // Not the private variety: the word may be shared between processes.
  return syscall(SYS_futex, &flag.word, operation, value, timeout, nullptr, 0);
}

// Active for a while after hit(); the while doubles as long as hits follow closely.
struct Backoff {
  int64_t until = 0, span = 0;
  bool active(int64_t now) const { return now < until; }
  void hit(int64_t now) {
    const bool again = span > 0 && now < until + 4 * span;
    span = again ? std::min(2 * span, kBackoffMax) : kBackoff;
    until = now + span;
  }
};

// What this thread has seen of its neighbours.
class ThreadState {
 public:
  ThreadState() {
    cpu_set_t set;
    cpus_ = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    if (std::getenv("TRUESHARD_TIME_SLICE_US") != nullptr) request_time_slice(worker_time_slice_us());
  }
  bool fits(int ranks) const { return ranks <= cpus_; }
  bool may_yield() const { return !no_yield_.active(clock_ns()); }

  bool spin(const Flag& flag, uint64_t number) {
    const int64_t start = clock_ns();
    const bool brief = brief_spin_.active(start);
    const int64_t budget = brief ? spin_ : kQuietSpin;
    for (int64_t last = start;;) {
      for (int i = 0; i < 16; ++i) {
        if (reached(flag, number)) {
          if (brief) spin_ = std::min(2 * spin_, kContendedSpin);
          return true;
        }
        cpu_pause();
      }
      const int64_t now = clock_ns();
      if (now - last > kHole) {
        brief_spin_.hit(now);
        return reached(flag, number);
      }
      if (now - start > budget) break;
      last = now;
    }
    if (brief) spin_ = std::max(spin_ / 2, kMinSpin);
    return false;
  }

  bool yield(const Flag& flag, uint64_t number) {
    const int64_t start = clock_ns();
    for (int64_t last = start;;) {
      sched_yield();
      const bool done = reached(flag, number);
      const int64_t now = clock_ns();
      if (now - last > kHole) {
        const bool costly = cheap_yields_ < kCheapYields;
        cheap_yields_ = 0;
        if (costly) {
          no_yield_.hit(now);
          return done;
        }
      } else if (cheap_yields_ < kCheapYields) {
        ++cheap_yields_;
      }
      if (done) return true;
      if (now - start > kYieldLimit) return false;
      last = now;
    }
  }

 private:
  int cpus_ = 1;
  int64_t spin_ = kContendedSpin;
  int cheap_yields_ = 0;
  Backoff brief_spin_, no_yield_;
};

bool sleep(Flag& flag, uint64_t number, const WaitLimits& limits, GiveUp& give_up) {
  for (;;) {
    uint32_t seen = flag.word.load(std::memory_order_acquire);
    if (reached_word(seen, number)) return true;
    if ((seen & 1u) == 0) {  // announce the sleeper; fails, and looks again, when the poster was faster
      if (!flag.word.compare_exchange_weak(seen, seen | 1u, std::memory_order_acq_rel)) continue;
      seen |= 1u;
    }
    if (give_up() && !reached(flag, number)) return false;
    int64_t slice = kSleepSlice;
    if (limits.deadline_ns != 0) {
      const int64_t left = limits.deadline_ns - clock_ns();
      if (left > 0) slice = std::min(slice, left + kMilli);
    }
    const timespec timeout{static_cast<time_t>(slice / 1000000000), static_cast<long>(slice % 1000000000)};
    futex(flag, FUTEX_WAIT, seen, &timeout);
  }
}

}  // namespace

void post(Flag& flag, uint64_t number) {
  const int cpu = sched_getcpu();
  if (flag.cpu.load(std::memory_order_relaxed) != cpu) flag.cpu.store(cpu, std::memory_order_relaxed);
  // An exchange, so that no sleeper can announce itself between the store and the check.
  if ((flag.word.exchange(static_cast<uint32_t>(number) << 1, std::memory_order_acq_rel) & 1u) != 0) {
    futex(flag, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void ring(Flag& flag) {
  flag.cpu.store(sched_getcpu(), std::memory_order_relaxed);
  uint32_t word = flag.word.load(std::memory_order_relaxed);
  while (!flag.word.compare_exchange_weak(word, (word & ~1u) + 2u, std::memory_order_acq_rel)) {
  }
  if ((word & 1u) != 0) futex(flag, FUTEX_WAKE, INT_MAX, nullptr);
}

void wake(Flag& flag) {
  if ((flag.word.load(std::memory_order_acquire) & 1u) != 0) futex(flag, FUTEX_WAKE, INT_MAX, nullptr);
}

bool wait(Flag& flag, uint64_t number, const WaitLimits& limits, GiveUp& give_up) {
  if (reached(flag, number)) return true;
  thread_local ThreadState state;
  const bool shares_cpu = flag.cpu.load(std::memory_order_relaxed) == sched_getcpu();
  if (state.fits(limits.ranks_here) && !shares_cpu) {
    if (state.spin(flag, number)) return true;
  } else if (state.may_yield()) {
    if (state.yield(flag, number)) return true;
  }
  return sleep(flag, number, limits, give_up);
}

bool request_time_slice(int64_t microseconds) {
  struct {
    uint32_t size = 56, policy = 0;  // the kernel's struct sched_attr, version 1
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t runtime = 0, deadline = 0, period = 0;
    uint32_t clamp_min = 0, clamp_max = 0;
  } attributes;
  static_assert(sizeof attributes == 56);
  if (syscall(SYS_sched_getattr, 0, &attributes, static_cast<unsigned>(sizeof attributes), 0) != 0) return false;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return false;
  attributes.size = sizeof attributes;
  attributes.flags = 0;
  attributes.runtime = static_cast<uint64_t>(std::clamp<int64_t>(microseconds, 0, 100000)) * 1000;
  return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0;
}

int64_t worker_time_slice_us() {
  const char* text = std::getenv("TRUESHARD_TIME_SLICE_US");
  const int64_t value = text == nullptr ? 0 : std::atoll(text);
  return value > 0 ? value : 100;
}

}  // namespace trueshard::comm
