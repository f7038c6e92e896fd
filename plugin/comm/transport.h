// SPDX-License-Identifier: BSD-3-Clause
// Role: what the ranks of one group share on one host: memory that every rank can read, flags to wait on, and failure.
// Two implementations behind this interface, chosen by what the ranks tell one another through the store (never by
// environment variables): ranks that are threads of one process, and ranks that are processes of one host.
// Invariants: I1 allocate() is collective: all ranks call it in the same order with the same name. I2 nothing stays
// behind
//             when a process is killed at any moment. I3 the first failure wins; after it every call throws its text at
//             once.
// Shapes: bytes. Threads: all functions may be called from any thread. Errors: c10::DistBackendError.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "plugin/comm/private_view.h"
#include "plugin/comm/wake_list.h"

namespace trueshard::comm {

class Region {  // one block of zeroed memory per rank, all of them readable (and writable) by every rank
 public:
  virtual ~Region() = default;
  virtual std::byte* data(
      int rank) const = 0;  // 64-byte aligned; bases of large blocks are staggered against cache aliasing
  virtual size_t bytes(int rank) const = 0;
  // This rank's own look at a rank's block (allocated with Views::kPrivate), and where the block begins in it.
  virtual std::shared_ptr<PrivateView> view(int rank) const = 0;
  virtual size_t view_offset(int rank) const = 0;
};

enum class Views { kNone, kPrivate };

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* kind() const = 0;  // "threads" or "shared memory"
  virtual const std::string& group_name() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  // Collective. Ranks may ask for different sizes (0 included). Pages that are never touched cost nothing.
  virtual std::shared_ptr<Region> allocate(const std::string& name, size_t bytes, Views views = Views::kNone) = 0;
  // Marks the group failed for all ranks and wakes every waiter. The text should say where, who, got, expected, what to
  // do.
  virtual void fail(const std::string& text) noexcept = 0;
  virtual bool failed() const noexcept = 0;
  virtual void throw_if_failed() const = 0;
  // Throws in a forked child, which has no place among the ranks; `call` is what it tried.
  virtual void check_process(const char* call) const = 0;
  // False once the peer is known to be gone: its process has ended, or it has released its transport.
  virtual bool peer_alive(int rank) const noexcept = 0;
  // "process 4711 has ended" or "has closed the group"; after peer_alive() said false.
  virtual std::string how_peer_left(int rank) const = 0;
  // Flags that somebody may sleep on: fail() wakes them.
  virtual WakeList& wake_list() noexcept = 0;
};

// Collective. Exchanges host and process identities through the store and picks the implementation; ranks on different
// hosts are an error on all ranks. `group_name` must be the same on all ranks and unique in the store.
std::shared_ptr<Transport> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const std::string& group_name, std::chrono::milliseconds timeout);

}  // namespace trueshard::comm
