// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/conversation.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "plugin/engine/backward_tracker.h"

namespace trueshard::checkpoint {

namespace {

constexpr size_t kMostErrorBytes = 4000;

struct Message {
  uint64_t error_bytes = 0, bytes = 0;
};

}  // namespace

Conversation::Conversation(std::shared_ptr<comm::Transport> transport, const std::string& operation, size_t most_bytes)
    : transport_(std::move(transport)), operation_(operation), capacity_(most_bytes) {
  if (size() == 1) return;
  const auto number = engine::BackwardTracker::of(transport_)->next_number();  // alike on all ranks
  const std::string name = operation + " " + std::to_string(number);
  region_ = transport_->allocate(name, sizeof(Message) + kMostErrorBytes + capacity_);
  comm::ChannelOptions options;
  options.trace = false;
  channel_ = std::make_unique<comm::Channel>(transport_, name, options);
}

std::string Conversation::me() const {
  return "trueshard[rank " + std::to_string(rank()) + "/" + std::to_string(size()) + "] " + operation_;
}

std::vector<std::string> Conversation::exchange(const std::string& error, const std::string& bytes) {
  if (size() == 1) {
    TORCH_CHECK(error.empty(), me(), ": ", error);
    return {bytes};
  }
  TORCH_CHECK(bytes.size() <= capacity_, me(), ": ", bytes.size(), " bytes to tell, at most ", capacity_,
              " were announced");
  if (last_ > 0) channel_->wait_all_read(last_);
  std::byte* mine = region_->data(rank());
  const std::string told = error.substr(0, kMostErrorBytes);
  const Message message{told.size(), bytes.size()};
  std::memcpy(mine, &message, sizeof message);
  std::memcpy(mine + sizeof message, told.data(), told.size());
  std::memcpy(mine + sizeof message + kMostErrorBytes, bytes.data(), bytes.size());
  last_ = channel_->post(comm::Fingerprint::of(operation_.c_str()));
  channel_->wait_all_posted(last_);
  std::vector<std::string> answers(static_cast<size_t>(size()));
  std::string first_error;
  for (int r = 0; r < size(); ++r) {
    const std::byte* theirs = region_->data(r);
    Message said;
    std::memcpy(&said, theirs, sizeof said);
    if (said.error_bytes > 0 && first_error.empty()) {
      first_error = "rank " + std::to_string(r) + ": " +
                    std::string(reinterpret_cast<const char*>(theirs) + sizeof said, said.error_bytes);
    }
    answers[static_cast<size_t>(r)].assign(reinterpret_cast<const char*>(theirs) + sizeof said + kMostErrorBytes,
                                           said.bytes);
  }
  channel_->done_reading(last_);
  TORCH_CHECK(first_error.empty(), me(), ": ", first_error);
  return answers;
}

void Conversation::require_same(const std::string& error, const std::string& text, const std::string& what) {
  const auto texts = exchange(error, text);
  for (size_t r = 1; r < texts.size(); ++r) {
    TORCH_CHECK(texts[r] == texts[0], me(), ": ", what, " differs: rank 0 has [", texts[0], "], rank ", r, " has [",
                texts[r], "]");
  }
}

}  // namespace trueshard::checkpoint
