// SPDX-License-Identifier: BSD-3-Clause
// Role: weights from elsewhere into a sharded or a plain module: safetensors (a file, a folder, a checkpoint, what
// PyTorch's DCP wrote through its Hugging Face writer), TorchScript files, modules saved with torch::save, and state
// dictionaries saved with torch.save. Optimizer state is left as it is.
// Invariants: I1 strict by name both ways, but for names the caller lists. I2 a value is taken as it is or widened
// exactly, never rounded. I3 all or nothing, on all ranks.
// Threads: collective; one. Errors: c10::Error, the same on all ranks.
#pragma once
#include "plugin/checkpoint/load.h"

namespace trueshard::checkpoint {

// `request.folder` is the path; exactly one target, an optimizer or a module.
void load_weights(const LoadRequest& request);

}  // namespace trueshard::checkpoint
