// SPDX-License-Identifier: BSD-3-Clause
// Role: what ranks tell each other during a save or a load: in each round every rank gives a text that says what went
// wrong on its side (or nothing) and some bytes, and gets everybody's bytes, or the same error as all others.
// Invariants: I1 made on the thread that makes all collective calls; rounds may then run on another thread, beside
// other collectives. Threads: one at a time. Errors: c10::Error, the same on all ranks, when any rank told one;
// c10::DistBackendError when a rank is gone or late.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "plugin/comm/channel.h"
#include "plugin/comm/errors.h"

namespace trueshard::checkpoint {

class Conversation {
 public:
  // `transport` null: one rank alone. Collective. `most_bytes`: of one rank's bytes in one round.
  Conversation(std::shared_ptr<comm::Transport> transport, const std::string& operation, size_t most_bytes);
  int rank() const { return transport_ ? transport_->rank() : 0; }
  int size() const { return transport_ ? transport_->size() : 1; }
  std::string me() const;  // "trueshard[rank 1/4] save_checkpoint"

  std::vector<std::string> exchange(const std::string& error, const std::string& bytes = {});
  // Every rank's text must be the same as rank 0's; `what` names it.
  void require_same(const std::string& error, const std::string& text, const std::string& what);

 private:
  std::shared_ptr<comm::Transport> transport_;
  std::string operation_;
  size_t capacity_ = 0;
  std::shared_ptr<comm::Region> region_;
  std::unique_ptr<comm::Channel> channel_;
  uint64_t last_ = 0;
};

// Runs the call and returns the text of what it threw, without source locations; empty: nothing.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    const auto text = comm::text_of(error);
    return text.empty() ? "an error without a text" : text;
  }
  return {};
}

}  // namespace trueshard::checkpoint
