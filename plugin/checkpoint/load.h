// SPDX-License-Identifier: BSD-3-Clause
// Role: loading a checkpoint into the running program: match names, read this rank's part into memory of its own,
// verify, and only then, when all ranks have all of it, take it over.
// Invariants: I1 strict both ways: what is missing, unexpected or of another shape or dtype is an error that names it,
// unless the caller listed it. I2 all or nothing, on all ranks. I3 a rank reads what it will hold, once.
// Threads: one. Errors: c10::Error, the same on all ranks; the program is then as it was.
#pragma once
#include "plugin/checkpoint/conversation.h"
#include "plugin/checkpoint/live_state.h"

namespace trueshard::checkpoint {

struct LoadRequest {
  std::vector<Target> targets;
  std::shared_ptr<comm::Transport> transport;  // null: alone
  std::string folder;
  std::vector<std::string> allow_missing,
      allow_unexpected;  // names as errors show them; a last '*' stands for any rest
  int64_t chunk_bytes = int64_t{8} << 20;
};

void load(const LoadRequest& request);  // collective

}  // namespace trueshard::checkpoint
