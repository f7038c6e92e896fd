// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/store_exchange.h"

#include <algorithm>
#include <thread>

#include "plugin/comm/errors.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {
constexpr int64_t kFirstPauseUs = 500, kLongestPauseUs = 20000;  // between two looks at the store
constexpr int64_t kGoneEveryNs = 100000000;                      // how often dead peers are looked for
}  // namespace

StoreExchange::StoreExchange(StoreEnds ends)
    : ends_(std::move(ends)), deadline_ns_(observe::now_ns() + ends_.timeout.count() * 1000000) {}

std::string StoreExchange::key(const std::string& what, int rank) const {
  return "trueshard/" + ends_.group + "/" + what + "/" + std::to_string(rank);
}

void StoreExchange::publish(const std::string& what, const std::string& text) {
  try {
    ends_.store->set(key(what, ends_.rank), text);
  } catch (const std::exception& error) {
    throw_backend_error(where(ends_.rank, ends_.size, ends_.group) +
                        ": writing to the store failed: " + text_of(error));
  }
}

void StoreExchange::throw_missing(const std::vector<std::string>& keys, const std::vector<int>& ranks,
                                  const std::string& what) {
  std::vector<int> missing;
  for (size_t i = 0; i < keys.size(); ++i) {
    bool there = false;
    try {
      there = ends_.store->check({keys[i]});
    } catch (const std::exception&) {
      // the store itself is gone: count the rank as missing
    }
    if (!there) missing.push_back(ranks[i]);
  }
  if (missing.empty()) missing = ranks;
  throw_backend_error(where(ends_.rank, ends_.size, ends_.group) + ": " + rank_list(missing) +
                      " did not arrive within " + std::to_string(ends_.timeout.count()) + " ms (waiting for '" + what +
                      "' in the store); check that all " + std::to_string(ends_.size) +
                      " ranks were started and use this group name, or give a longer timeout");
}

// Looks again and again in place of Store::wait: a TCPStore logs two warnings for each wait that times out, and nobody
// would look for dead peers meanwhile.
void StoreExchange::wait_for(const std::vector<std::string>& keys, const std::vector<int>& ranks,
                             const std::string& what) {
  int64_t looked_for_gone = observe::now_ns();
  for (int64_t pause_us = kFirstPauseUs;; pause_us = std::min(2 * pause_us, kLongestPauseUs)) {
    try {
      if (ends_.store->check(keys)) return;
    } catch (const std::exception& error) {
      throw_backend_error(where(ends_.rank, ends_.size, ends_.group) + ": waiting for '" + what +
                          "' in the store failed: " + text_of(error) +
                          "; check that the process that hosts the store still runs");
    }
    const int64_t now = observe::now_ns();
    if (now >= deadline_ns_) throw_missing(keys, ranks, what);
    if (anybody_gone_ != nullptr && now - looked_for_gone >= kGoneEveryNs) {
      looked_for_gone = now;
      const std::string gone = anybody_gone_();
      if (!gone.empty()) throw_backend_error(gone);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
  }
}

std::vector<std::string> StoreExchange::collect(const std::string& what) {
  std::vector<std::string> keys, texts;
  std::vector<int> ranks;
  for (int r = 0; r < ends_.size; ++r) {
    keys.push_back(key(what, r));
    ranks.push_back(r);
  }
  wait_for(keys, ranks, what);
  try {
    for (const std::string& k : keys) texts.push_back(ends_.store->get_to_str(k));
  } catch (const std::exception& error) {
    throw_backend_error(where(ends_.rank, ends_.size, ends_.group) + ": reading '" + what +
                        "' from the store failed: " + text_of(error));
  }
  return texts;
}

std::string StoreExchange::fetch(const std::string& what, int from) {
  wait_for({key(what, from)}, {from}, what);
  return ends_.store->get_to_str(key(what, from));
}

void StoreExchange::forget(const std::vector<std::string>& whats) noexcept {
  try {
    for (const std::string& what : whats) {
      for (int r = 0; r < ends_.size; ++r) ends_.store->deleteKey(key(what, r));
    }
  } catch (const std::exception&) {
    // Leftover keys cost a few bytes; a store that cannot delete is no reason to fail.
  }
}

}  // namespace trueshard::comm
