// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/errors.h"

#include <c10/util/Exception.h>

namespace trueshard::comm {

std::string where(int rank, int size, const std::string& group) {
  return "trueshard[rank " + std::to_string(rank) + "/" + std::to_string(size) + "] group '" + group + "'";
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

void throw_backend_error(const std::string& text) { C10_THROW_ERROR(DistBackendError, text); }

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}

}  // namespace trueshard::comm
