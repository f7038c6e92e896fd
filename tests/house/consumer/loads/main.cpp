// SPDX-License-Identifier: BSD-3-Clause
// Refers to no symbol of trueshard, only links it: the library must be loaded all the same, and its operators be there.
#include <iostream>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

#ifndef NDEBUG
#error "NDEBUG must come from trueshard::trueshard: libtorch is built with it"
#endif
static_assert(__cplusplus >= 202002L, "C++20 must come from trueshard::trueshard");

int main() {
  const auto op = c10::Dispatcher::singleton().findSchema({"trueshard::build_info", ""});
  if (!op.has_value()) {
    std::cerr << "operator trueshard::build_info is not registered: the linker dropped the library\n";
    return 1;
  }
  std::vector<c10::IValue> stack;
  op->callBoxed(stack);
  std::cout << stack.at(0).toStringRef() << "\n";
  return 0;
}
