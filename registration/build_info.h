// SPDX-License-Identifier: BSD-3-Clause
// Role: what a loaded library says about itself. Registered as the operator `trueshard::build_info() -> str`, by which
// C++, TorchScript and Python see that the library is there. Threads: any. Errors: none; a torch version that does not
// fit is part of the text, and an error of every public entry.
#pragma once
#include <string>

namespace trueshard::registration {

// "trueshard 0.1.0, compiled for torch 2.13.0, running torch 2.13.0"
std::string build_info();

}  // namespace trueshard::registration
