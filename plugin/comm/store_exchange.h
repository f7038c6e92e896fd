// SPDX-License-Identifier: BSD-3-Clause
// Role: the few texts that ranks exchange through the c10d store before they share memory.
// Invariants: I1 every wait ends by the deadline and names the ranks that are missing. I2 rank 0 deletes all keys at
// the end. Threads: one thread. Errors: c10::DistBackendError.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace trueshard::comm {

struct StoreEnds {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::string group;
  std::chrono::milliseconds timeout{0};
};

class StoreExchange {
 public:
  explicit StoreExchange(StoreEnds ends);
  void publish(const std::string& what, const std::string& text);  // once per rank and `what`
  // The texts of all ranks, in rank order. `anybody_gone` may return the text of an error that ends the wait.
  std::vector<std::string> collect(const std::string& what);
  std::string fetch(const std::string& what, int from);
  void watch(std::function<std::string()> anybody_gone) { anybody_gone_ = std::move(anybody_gone); }
  void forget(const std::vector<std::string>& whats) noexcept;

 private:
  std::string key(const std::string& what, int rank) const;
  void wait_for(const std::vector<std::string>& keys, const std::vector<int>& ranks, const std::string& what);
  [[noreturn]] void throw_missing(const std::vector<std::string>& keys, const std::vector<int>& ranks,
                                  const std::string& what);
  StoreEnds ends_;
  int64_t deadline_ns_;
  std::function<std::string()> anybody_gone_;
};

}  // namespace trueshard::comm
