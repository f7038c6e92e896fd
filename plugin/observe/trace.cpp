// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/observe/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>

#include <c10/util/Exception.h>

namespace trueshard::observe {
namespace {

std::string escaped(const char* text) {
  std::string out;
  for (const char* c = text; *c != '\0'; ++c) {
    const auto byte = static_cast<unsigned char>(*c);
    if (byte == '"' || byte == '\\') {
      out += '\\';
      out += *c;
    } else if (byte < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(byte));
      out += code;
    } else {
      out += *c;
    }
  }
  return out;
}

constexpr int kUnread = -2, kOff = -1;
std::atomic<int> g_trace_file{kUnread};

// A forked child is a process of its own and reads its own environment.
void forget_trace_file() {
  const int file = g_trace_file.exchange(kUnread);
  if (file >= 0) ::close(file);
}

// Opened at first use; every line is one write with O_APPEND, so that ranks may share a file.
int trace_file() {
  const int known = g_trace_file.load(std::memory_order_acquire);
  if (known != kUnread) return known;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (g_trace_file.load(std::memory_order_acquire) != kUnread) return g_trace_file;
  static const int registered = ::pthread_atfork(nullptr, nullptr, forget_trace_file);
  static_cast<void>(registered);
  int file = kOff;
  const char* path = std::getenv("TRUESHARD_TRACE");
  if (path != nullptr && *path != '\0') {
    file = ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    TORCH_CHECK(file >= 0, "trueshard: TRUESHARD_TRACE: cannot open '", path, "' for writing: ", std::strerror(errno),
                "; name a file in a folder that exists and is writable, or unset the variable");
  }
  g_trace_file.store(file, std::memory_order_release);
  return file;
}

double parse_number(const std::string& field, const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  TORCH_CHECK(!value.empty() && *end == '\0' && number >= 0 && number <= 1e6, "trueshard: TRUESHARD_CHAOS: field '",
              field, "' is '", value, "', expected a number from 0 to 1000000, as in \"delay_ms=20,poison=1,seed=7\"");
  return number;
}

std::atomic<const ChaosOptions*> g_chaos{nullptr};

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace

bool trace_enabled() { return trace_file() >= 0; }

int64_t now_ns() {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1000000000 + ts.tv_nsec;
}

void trace(const TraceEvent& event) {
  const int file = trace_file();
  if (file < 0) return;
  std::string line = "{\"group\":\"" + escaped(event.group) + "\",\"channel\":\"" + escaped(event.channel) +
                     "\",\"operation\":\"" + escaped(event.operation) + "\",\"dtype\":\"" + escaped(event.dtype) +
                     "\",\"rank\":" + std::to_string(event.rank) + ",\"sequence\":" + std::to_string(event.sequence) +
                     ",\"elements\":" + std::to_string(event.elements) +
                     ",\"start_ns\":" + std::to_string(event.start_ns) + ",\"end_ns\":" + std::to_string(event.end_ns) +
                     "}\n";
  // A full disk must not end a training run: a line that cannot be written is lost.
  while (::write(file, line.data(), line.size()) < 0 && errno == EINTR) {
  }
}

ChaosOptions parse_chaos(const std::string& text) {
  ChaosOptions options;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, comma - at);
    at = comma + 1;
    const size_t equals = item.find('=');
    const std::string field = item.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    if (field == "delay_ms") {
      options.delay_ms = parse_number(field, value);
    } else if (field == "poison") {
      options.poison = parse_number(field, value) != 0;
    } else if (field == "seed") {
      options.seed = static_cast<uint64_t>(parse_number(field, value));
    } else {
      TORCH_CHECK(false, "trueshard: TRUESHARD_CHAOS: unknown field '", field,
                  "', expected delay_ms, poison or seed, as in \"delay_ms=20,poison=1,seed=7\"");
    }
  }
  return options;
}

const ChaosOptions& chaos() {
  const ChaosOptions* options = g_chaos.load(std::memory_order_acquire);
  if (options != nullptr) return *options;
  const char* text = std::getenv("TRUESHARD_CHAOS");
  set_chaos_for_testing(parse_chaos(text == nullptr ? "" : text));
  return *g_chaos.load(std::memory_order_acquire);
}

void set_chaos_for_testing(const ChaosOptions& options) {
  // Earlier values are kept for ever: another thread may be reading them.
  static std::mutex mutex;
  static auto* const kept = new std::list<ChaosOptions>();
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(options);
  g_chaos.store(&kept->back(), std::memory_order_release);
}

void chaos_delay(int rank) {
  const ChaosOptions& options = chaos();
  if (options.delay_ms <= 0) return;
  thread_local const ChaosOptions* seeded_for = nullptr;
  thread_local uint64_t state = 0;
  if (seeded_for != &options) {
    seeded_for = &options;
    state = options.seed * 0x2545f4914f6cdd1dULL + static_cast<uint64_t>(rank) * 0x9e3779b97f4a7c15ULL;
  }
  const uint64_t draw = next_random(state);
  if ((draw & 3u) != 0) return;
  const double ms = options.delay_ms * static_cast<double>(draw >> 11) / 9007199254740992.0;
  timespec pause{};
  pause.tv_sec = static_cast<time_t>(ms / 1e3);
  pause.tv_nsec = static_cast<long>((ms - static_cast<double>(pause.tv_sec) * 1e3) * 1e6);
  nanosleep(&pause, nullptr);
}

void chaos_poison(void* data, size_t bytes) {
  if (!chaos().poison || bytes == 0) return;
  std::memset(data, 0xff, bytes);
}

}  // namespace trueshard::observe
