// SPDX-License-Identifier: BSD-3-Clause
// Role: the only file that asks which torch this is. One binary per torch minor version.
// Threads, Errors: none.
#pragma once
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 13
#error "trueshard needs torch 2.13 or later (autograd nodes are intrusive_ptr from there on)"
#endif

namespace trueshard::comm {

// The torch these sources are compiled for (torch_version.h compares it with the one that runs).
constexpr int kTorchMajor = TORCH_VERSION_MAJOR;
constexpr int kTorchMinor = TORCH_VERSION_MINOR;
constexpr int kTorchPatch = TORCH_VERSION_PATCH;

// The options of the backend; nothing beyond c10d's own.
struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds limit) : c10d::Backend::Options("trueshard", limit) {}
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 14)
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif
};

}  // namespace trueshard::comm
