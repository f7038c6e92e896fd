// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/control_page.h"

#include <time.h>

#include <algorithm>
#include <cstring>

namespace trueshard::comm {

bool ControlPage::fail(int rank, const std::string& text) noexcept {
  uint32_t expected = kFine;
  if (!state_.compare_exchange_strong(expected, kWriting, std::memory_order_acq_rel)) return false;
  reporter_ = rank;
  const size_t length = std::min(text.size(), sizeof text_ - 1);
  std::memcpy(text_, text.data(), length);
  text_[length] = '\0';
  state_.store(kFailed, std::memory_order_release);
  return true;
}

std::string ControlPage::failure_text(int* reporter) const {
  for (int i = 0; i < 100 && state_.load(std::memory_order_acquire) == kWriting; ++i) {
    const timespec pause{0, 1000000};
    nanosleep(&pause, nullptr);
  }
  if (state_.load(std::memory_order_acquire) != kFailed) {  // killed while it wrote the text
    *reporter = -1;
    return "a rank reported a failure and ended before it could say which";
  }
  *reporter = reporter_;
  return text_;
}

}  // namespace trueshard::comm
