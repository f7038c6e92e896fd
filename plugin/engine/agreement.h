// SPDX-License-Identifier: BSD-3-Clause
// Role: what all ranks must have in common before anything moves. Each rank gives lines of text; the first line that
// differs is an error on all ranks, and so is an error that only one rank has found by itself. Threads: collective; one
// call at a time per transport. Errors: c10::Error with the same text on every rank.
#pragma once
#include <string>
#include <vector>

#include "plugin/comm/transport.h"

namespace trueshard::engine {

// Every rank's text, on every rank.
std::vector<std::string> exchange_texts(const std::shared_ptr<comm::Transport>& transport, const std::string& name,
                                        const std::string& text);

struct Statement {
  std::string local_error;         // empty: this rank found nothing wrong
  std::vector<std::string> lines;  // compared with rank 0's, in order
};
// `where` starts the error text; `advice` ends it.
void require_agreement(const std::shared_ptr<comm::Transport>& transport, const std::string& name,
                       const Statement& statement, const std::string& where, const std::string& advice);

}  // namespace trueshard::engine
