// SPDX-License-Identifier: BSD-3-Clause
// Role: the c10d backend "trueshard". Its reductions are the canonical tree with A = 1 over group ranks
// (docs/numerics.md section 1). Invariants: I1 an operation that cannot do what was asked throws on all ranks before
// data moves. I2 operations run in the
//             order of the calls; synchronous ones on the caller's thread when nothing is queued, others on one worker
//             thread.
// Threads: as c10d: one caller at a time per group; Work objects may be waited on from any thread.
// Errors: c10::DistBackendError after a communication failure (from then on at once), c10::Error for wrong arguments.
#pragma once
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <trueshard/export.h>

#include "plugin/comm/transport.h"

namespace trueshard::comm {

class Backend;  // c10d::Backend subclass, in backend.cpp's private header

TRUESHARD_API c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                             int size, const std::string& group_name,
                                                             std::chrono::milliseconds timeout);
// Ends what is under way on a backend made here and joins its threads, as its destructor would: for interpreters, which
// must not have such threads any more when they end.
TRUESHARD_API void close_backend(c10d::Backend& backend);
// How destructors of this library wait for their own threads. A binding to a language with a global lock gives it up
// meanwhile: a callback on such a thread may want it.
TRUESHARD_API void set_blocking_call(void (*call)(void (*function)(void*), void* argument)) noexcept;
// The transport under a process group made by trueshard; throws c10::Error naming init_process_group when it is another
// backend's.
std::shared_ptr<Transport> transport_of(const c10d::ProcessGroup& group);

}  // namespace trueshard::comm
