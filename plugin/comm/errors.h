// SPDX-License-Identifier: BSD-3-Clause
// Role: the common head of every communication error, and how it is thrown.
// Invariants: every text starts with where it happened: trueshard[rank r/W] group 'name'. Threads: pure functions.
// Errors: throw_backend_error always throws c10::DistBackendError.
#pragma once
#include <string>
#include <vector>

namespace trueshard::comm {

// "trueshard[rank 1/4] group 'g'"
std::string where(int rank, int size, const std::string& group);
// "rank 2", "ranks 2 and 3", "ranks 0, 2 and 3"
std::string rank_list(const std::vector<int>& ranks);
[[noreturn]] void throw_backend_error(const std::string& text);
// The text of an exception without the source locations that c10 adds to what().
std::string text_of(const std::exception& error);

}  // namespace trueshard::comm
