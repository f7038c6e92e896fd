// SPDX-License-Identifier: BSD-3-Clause
// Role: all-reduce of sparse COO tensors: the ranks agree on the union of their rows, then reduce it as a dense array.
// Invariants: I1 the bits are those of the dense all-reduce (an absent row counts as zeros). I2 the result is coalesced
// and the same on all ranks. Shapes: any sparse and dense dimensions, alike on all ranks. Threads: the conduit's.
// Errors: as the conduit's.
#pragma once
#include <string>

#include <ATen/core/Tensor.h>

#include "plugin/comm/conduit.h"

namespace trueshard::comm {

std::string refuse_sparse(const at::Tensor& tensor);
// What must agree between ranks, for the fingerprint.
uint64_t sparse_digest(const at::Tensor& tensor);
void all_reduce_sparse(Conduit& conduit, const CollectiveCall& call, const at::Tensor& tensor);

}  // namespace trueshard::comm
