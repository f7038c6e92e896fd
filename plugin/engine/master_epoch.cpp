// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/master_epoch.h"

#include <new>

#include "plugin/comm/errors.h"
#include "plugin/comm/patience.h"

namespace trueshard::engine {

MasterEpoch::MasterEpoch(const std::shared_ptr<comm::Transport>& transport, const std::string& name)
    : transport_(transport),
      region_(transport->allocate(name + "/epoch", sizeof(comm::Flag) + alignof(comm::Flag))),
      rank_(transport->rank()),
      where_("trueshard[rank " + std::to_string(transport->rank()) + "/" + std::to_string(transport->size()) +
             "] gather parameters: ") {
  for (int r = 0; r < transport->size(); ++r) {
    void* memory = region_->data(r);
    size_t room = sizeof(comm::Flag) + alignof(comm::Flag);
    // Zeroed memory is a flag that stands at 0.
    flags_.push_back(static_cast<comm::Flag*>(std::align(alignof(comm::Flag), sizeof(comm::Flag), memory, room)));
  }
  transport->wake_list().add(this, flags_);
}

MasterEpoch::~MasterEpoch() {
  if (const auto transport = transport_.lock()) transport->wake_list().remove(this);
}

void MasterEpoch::advance() {
  const uint64_t number = number_.fetch_add(1) + 1;
  comm::post(*flags_[static_cast<size_t>(rank_)], number);
}

void MasterEpoch::wait() {
  const uint64_t number = number_.load();
  if (seen_.load(std::memory_order_acquire) >= number) return;
  bool all = true;
  for (const auto* flag : flags_) all &= comm::reached(*flag, number);
  if (!all) {
    const auto transport = transport_.lock();
    if (!transport) {
      comm::throw_backend_error(where_ +
                                "the process group is gone, and another rank had not finished its last step; keep the "
                                "group until the module's last use");
    }
    const auto result = comm::wait_for_all({*transport, flags_.data(), number, transport->timeout()});
    if (result.outcome == comm::Outcome::kFailed) transport->throw_if_failed();
    if (result.outcome != comm::Outcome::kReached) {
      const int late = result.late.empty() ? -1 : result.late.front();
      std::string text = where_ + "rank " + std::to_string(late);
      text += result.outcome == comm::Outcome::kGone
                  ? " is gone (" + transport->how_peer_left(late) + ") before it finished its step"
                  : " has not finished its step within " + std::to_string(transport->timeout().count()) + " ms";
      text += "; look there for the cause";
      transport->fail(text);
      comm::throw_backend_error(text);
    }
  }
  seen_.store(number, std::memory_order_release);
}

}  // namespace trueshard::engine
