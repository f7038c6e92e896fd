// SPDX-License-Identifier: BSD-3-Clause
// Role: what a launcher's environment variables say about this rank: torchrun first, then Open MPI, then Slurm (inside
// a step). Invariants: a pure function of the variables. Threads: any. Errors: c10::Error that names the variable that
// is missing or wrong; an environment without any of the launchers is world size 1.
#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace trueshard::comm {

using Variables = std::map<std::string, std::string>;

struct Launch {
  enum class Store { kNone, kTcp, kFile };
  int rank = 0;
  int size = 1;
  Store store = Store::kNone;
  std::string host;  // kTcp
  uint16_t port = 0;
  bool host_store = false;  // this rank runs the TCP store
  std::string job;          // kFile: names the job; the same on all its ranks, unlike that of any other job of the user
  std::string prefix;       // of all keys: restarts of torchrun use fresh ones
};
Launch parse_launch(const Variables& variables);
// The variables that parse_launch looks at, from this process.
Variables launch_variables();

}  // namespace trueshard::comm
