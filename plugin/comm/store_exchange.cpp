// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/store_exchange.h"

#include <algorithm>

#include "plugin/comm/errors.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {
constexpr int64_t kSliceMs = 300;  // how long one look at the store lasts; between two, dead peers are noticed
}

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

void StoreExchange::wait_for(const std::vector<std::string>& keys, const std::vector<int>& ranks,
                             const std::string& what) {
  for (;;) {
    const int64_t start = observe::now_ns();
    const int64_t left_ms = (deadline_ns_ - start) / 1000000;
    if (left_ms <= 0) throw_missing(keys, ranks, what);
    const int64_t slice_ms = std::min(kSliceMs, left_ms);
    std::string why;
    try {
      ends_.store->wait(keys, std::chrono::milliseconds(slice_ms));
      return;
    } catch (const std::exception& error) {
      why = text_of(error);
    }
    if (anybody_gone_ != nullptr) {
      const std::string gone = anybody_gone_();
      if (!gone.empty()) throw_backend_error(gone);
    }
    // A store that refuses long before the slice is over is broken, not slow.
    if ((observe::now_ns() - start) / 1000000 < slice_ms / 2) {
      throw_backend_error(where(ends_.rank, ends_.size, ends_.group) + ": waiting for '" + what +
                          "' in the store failed: " + why + "; check that the process that hosts the store still runs");
    }
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
