// SPDX-License-Identifier: BSD-3-Clause
// Role: TRUESHARD_TRACE=file: one JSON line per collective. TRUESHARD_CHAOS="delay_ms=20,poison=1,seed=7": random
// delays in the transport and NaN-filled returned buffers, to test programs (and this library) under bad timing and
// stale reads. Invariants: I1 both are read once per process, at first use; off means one branch. I2 neither changes a
// result's bits. Threads: all functions may be called from any thread. Errors: c10::Error for a malformed
// TRUESHARD_CHAOS, at first use.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace trueshard::observe {

struct TraceEvent {
  const char* group = "";
  const char* channel = "";
  const char* operation = "";
  const char* dtype = "";
  int rank = 0;
  uint64_t sequence = 0;
  int64_t elements = 0;
  int64_t start_ns = 0, end_ns = 0;  // CLOCK_MONOTONIC
};
bool trace_enabled();
void trace(const TraceEvent& event);
int64_t now_ns();

struct ChaosOptions {
  double delay_ms = 0;  // each delay is uniform in [0, delay_ms), with probability 1/4 per point
  bool poison = false;
  uint64_t seed = 0;
};
ChaosOptions parse_chaos(const std::string& text);  // throws c10::Error naming the bad field
const ChaosOptions& chaos();                        // from the environment, or as set by a test
void set_chaos_for_testing(const ChaosOptions& options);
void chaos_delay(int rank);                   // maybe sleeps
void chaos_poison(void* data, size_t bytes);  // maybe fills with 0xff (NaN in every floating type)

}  // namespace trueshard::observe
