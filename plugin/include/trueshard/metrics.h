// SPDX-License-Identifier: BSD-3-Clause
// Role: what a sharded optimizer has done so far, and where its memory is. Reading costs no communication.
#pragma once
#include <cstdint>

#include <trueshard/export.h>

namespace trueshard {

// Bytes held by this rank right now, by purpose (padding included). docs/design.md gives the formula for each stage.
struct TRUESHARD_API MemoryMetrics {
  // Whole parameters in the compute dtype, of what ranks share an equal part; Zero3: units that are whole right now.
  int64_t parameters = 0;
  int64_t masters = 0;          // master weights that are not part of `parameters`
  int64_t gradients = 0;        // reduced gradients
  int64_t partial_sums = 0;     // partial sums of the tree beyond the first
  int64_t deferred = 0;         // local gradients under NoSyncGuard
  int64_t optimizer_state = 0;  // tensors in state()
  int64_t exchange = 0;         // gradients of one pass on their way to the other ranks (touched part)
  int64_t between_steps() const { return parameters + masters + gradients + optimizer_state + deferred; }
};

struct TRUESHARD_API Metrics {
  int64_t steps = 0;  // taken
  int64_t skipped_steps = 0;
  double loss_scale = 1.0;           // of the last reduced gradient; 1 when the loss was not scaled
  double grad_norm = 0.0;            // the last one that clip_grad_norm_ computed
  int64_t bytes_reduced = 0;         // gradient bytes this rank handed to reductions
  int64_t bytes_gathered = 0;        // parameter (or gradient) bytes this rank fetched from others
  int64_t collectives = 0;           // messages this rank posted
  double seconds_waited = 0;         // for other ranks
  double seconds_communicating = 0;  // waiting included: exchange, sum and gather
  int64_t passes = 0;                // synchronised backward passes since the gradients were last zeroed
  int intra_op_threads = 0;          // libtorch's; gradients change with it, so keep it the same everywhere
  MemoryMetrics memory;
};

}  // namespace trueshard
