// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/torch_version.h"

#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "plugin/comm/torch_compat.h"

namespace trueshard::comm {

TorchVersion compiled_torch() { return {kTorchMajor, kTorchMinor, kTorchPatch}; }

TorchVersion running_torch() {
  // One byte each from the top: major, minor, patch (torch/headeronly/version.h). A C function of libtorch: its address
  // and meaning do not depend on the version, which is what this file is about.
  const uint64_t packed = aoti_torch_abi_version();
  const auto byte = [packed](int shift) { return static_cast<int>((packed >> shift) & 0xffu); };
  return {byte(56), byte(48), byte(40)};
}

std::string to_string(const TorchVersion& version) {
  return std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.patch);
}

std::string torch_mismatch(const TorchVersion& compiled, const TorchVersion& running) {
  if (compiled.major == running.major && compiled.minor == running.minor) return {};
  return "trueshard load: this library was compiled for torch " + to_string(compiled) +
         ", but the process runs torch " + to_string(running) +
         "; rebuild trueshard against that torch, or load torch " + std::to_string(compiled.major) + "." +
         std::to_string(compiled.minor);
}

void require_compatible_torch() {
  static const std::string error = torch_mismatch(compiled_torch(), running_torch());
  TORCH_CHECK(error.empty(), error);
}

}  // namespace trueshard::comm
