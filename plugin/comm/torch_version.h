// SPDX-License-Identifier: BSD-3-Clause
// Role: says whether the libtorch that is running is the one this library was compiled for. The layout of c10d's
// classes changes between minor releases without a change of file names, so that a mismatch loads and then calls the
// wrong functions. Invariants: I1 equal major and minor are compatible, anything else is not. I2 nothing here throws
// while a library is loading. Threads: all functions may be called from any thread. Errors: c10::Error from
// require_compatible_torch().
#pragma once
#include <cstdint>
#include <string>

namespace trueshard::comm {

struct TorchVersion {
  int major = 0;
  int minor = 0;
  int patch = 0;
};

TorchVersion compiled_torch();  // the headers this library was compiled with
TorchVersion running_torch();   // the libtorch of this process
std::string to_string(const TorchVersion& version);

// Empty when code compiled for `compiled` may run on `running`, else the text of the error, with both versions.
std::string torch_mismatch(const TorchVersion& compiled, const TorchVersion& running);

// Every way into the library calls it before it touches a c10d object: init_process_group, shard, the backend's
// creator.
void require_compatible_torch();

}  // namespace trueshard::comm
