// SPDX-License-Identifier: BSD-3-Clause
// Role: the only file that knows torch's version macros. What differs between releases is given one name here, so that
// no other file has a version `#if`.
#pragma once
#include <torch/headeronly/version.h>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 13
#error "trueshard needs torch 2.13 or later (autograd nodes are intrusive_ptr from there on)"
#endif

namespace trueshard::comm {

constexpr int kTorchMajor = TORCH_VERSION_MAJOR;
constexpr int kTorchMinor = TORCH_VERSION_MINOR;
constexpr int kTorchPatch = TORCH_VERSION_PATCH;

}  // namespace trueshard::comm
