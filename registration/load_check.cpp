// SPDX-License-Identifier: BSD-3-Clause
// What happens when the library is loaded: the operator by which it can be seen is registered, nothing else. A torch of
// another minor version cannot be reported from here (an exception out of a static initialiser ends the process); the
// operator's text names it and every public entry throws it (plugin/comm/torch_version.h).
#include <torch/library.h>

#include "plugin/comm/torch_version.h"
#include "registration/build_info.h"
#include "trueshard_version.h"

namespace trueshard::registration {

std::string build_info() {
  const comm::TorchVersion compiled = comm::compiled_torch();
  const comm::TorchVersion running = comm::running_torch();
  std::string text = std::string("trueshard ") + kTrueshardVersion + ", compiled for torch " +
                     comm::to_string(compiled) + ", running torch " + comm::to_string(running);
  const std::string mismatch = comm::torch_mismatch(compiled, running);
  return mismatch.empty() ? text : text + " (" + mismatch + ")";
}

TORCH_LIBRARY_FRAGMENT(trueshard, library) {
  library.def("build_info() -> str", [] { return build_info(); });
}

}  // namespace trueshard::registration
