// SPDX-License-Identifier: BSD-3-Clause
// See algorithm.h.
#pragma once
#include <chrono>
#include <memory>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport
}  // namespace gloo
