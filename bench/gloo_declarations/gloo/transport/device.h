// SPDX-License-Identifier: BSD-3-Clause
// See algorithm.h.
#pragma once
namespace gloo::transport {
class Device;
class UnboundBuffer;
}  // namespace gloo::transport
