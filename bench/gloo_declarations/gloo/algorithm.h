// SPDX-License-Identifier: BSD-3-Clause
// Declarations that c10d/ProcessGroupGloo.hpp names; the wheel exports the class but ships no Gloo headers. Nothing of
// a Gloo type's layout is used here: every member is a pointer, and all functions are defined in libtorch_cpu.
#pragma once
