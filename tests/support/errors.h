// SPDX-License-Identifier: BSD-3-Clause
// Role: the text of the c10::Error that a call throws, without source locations; "no error" when it throws none.
#pragma once
#include <c10/util/Exception.h>

#include <functional>
#include <string>

namespace trueshard::testing {

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace trueshard::testing
