// SPDX-License-Identifier: BSD-3-Clause
// The library is compiled with hidden visibility; what is marked here is its public interface.
#pragma once
#define TRUESHARD_API __attribute__((visibility("default")))
