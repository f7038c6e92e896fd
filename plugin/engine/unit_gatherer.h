// SPDX-License-Identifier: BSD-3-Clause
// Role: ZeRO-3's gather. A managed parameter's storage shows its whole compute copy only while its unit is whole; else
// it is freed and carries a text that says so. Units are put together straight from every rank's masters, rounded to
// the compute dtype on the way (or shown where masters lie, without a copy): no message, no help from a peer, so ranks
// may use different modules in different order. Invariants: I1 TensorImpl and StorageImpl of a parameter never change,
// only what the storage points to. I2 a pinned or written unit stays whole. I3 what is whole takes at most
// `resident_bytes` beyond pinned and written units. I4 masters are read only while no rank writes them: callers let all
// ranks meet before they write, and then call masters_changed(); settle() ends what runs ahead before the ranks meet.
// I5 lives as long as a storage shows one of its parameters: a module can be read after its optimizer is gone. Shapes:
// a unit is one buffer, each parameter in it starts on 64 bytes. Threads: all functions, from any thread, unless noted.
// Errors: c10::DistBackendError when a rank does not finish its step; pin() then changes nothing.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plugin/comm/private_view.h"
#include "plugin/engine/master_epoch.h"
#include "plugin/engine/use_order.h"
#include "plugin/plan/shard_plan.h"
#include "plugin/plan/unit_plan.h"

namespace trueshard::engine {

struct GatherPiece {  // of one parameter, in one rank's master
  const std::byte* master = nullptr;
  plan::Range range;
  bool local = false;
};

struct GatherSpec {  // one parameter
  std::string name;
  c10::ScalarType compute_dtype = c10::kFloat, stored_dtype = c10::kFloat;
  int64_t numel = 0;
  std::vector<GatherPiece> pieces;
  std::byte* view = nullptr;  // where masters can be read as they are: shown as it is, never copied
};

struct GathererParts {
  std::vector<GatherSpec> parameters;
  plan::UnitPlan units;
  int64_t resident_bytes = 0;
  int64_t prefetch_units = 0;
  std::unique_ptr<MasterEpoch> epoch;
  std::shared_ptr<void> memory;             // keeps the masters mapped
  std::shared_ptr<comm::PrivateView> view;  // in which the parameters' views lie; may be null
};

class UnitGatherer : public std::enable_shared_from_this<UnitGatherer> {
 public:
  explicit UnitGatherer(GathererParts parts);
  ~UnitGatherer();
  UnitGatherer(const UnitGatherer&) = delete;
  UnitGatherer& operator=(const UnitGatherer&) = delete;

  // The storage shows the parameter from now on (freed at first) until something else is put into it.
  void attach(int64_t parameter, c10::StorageImpl* storage);
  // Leaves the storage empty; it is not managed any more.
  void detach(int64_t parameter);
  bool attached(int64_t parameter, const c10::StorageImpl* storage) const;

  // Makes the parameter's unit whole and keeps it so until unpin().
  void pin(int64_t parameter);
  void unpin(int64_t parameter) noexcept;
  const std::byte* contents(int64_t parameter) const;  // whole; valid while pinned or written

  // Somebody wrote to the whole copy (which is pinned): it is kept until the value was taken over (forget_write) or
  // masters change.
  void note_write(int64_t parameter);
  // The whole copy (written) has the bits that a gather would give it. Reads all masters.
  bool agrees_with_masters(int64_t parameter);
  bool written(int64_t parameter) const;
  void forget_write(int64_t parameter);

  // Nothing is being made whole ahead of its use when this returns.
  void settle();
  // This rank has written to its masters (or would have): what is whole is out of date. A round of uses ends here.
  void masters_changed();

  int64_t resident_bytes() const;  // whole units and spare buffers
  int64_t bytes_gathered() const;  // out of other ranks' masters
  double seconds() const;          // spent gathering
  const GatherSpec& spec(int64_t parameter) const { return parts_.parameters[static_cast<size_t>(parameter)]; }

 private:
  enum class State { kFreed, kGathering, kWhole };
  struct Slot {
    UnitGatherer* owner = nullptr;
    int64_t parameter = 0;
    c10::StorageImpl* storage = nullptr;
    size_t offset = 0;  // in the unit's buffer
    bool written = false;
    std::string text;
  };
  struct Buffer {
    at::DataPtr data;
    size_t capacity = 0;
  };
  struct UnitState {
    State state = State::kFreed;
    Buffer buffer;
    size_t bytes = 0;
    int pins = 0, writes = 0;
    bool stale = false;  // masters changed while it was pinned
  };
  using Lock = std::unique_lock<std::mutex>;

  static void storage_gone(void* slot);
  UnitState& unit_of(int64_t parameter) {
    return units_[static_cast<size_t>(parts_.units.unit_of[static_cast<size_t>(parameter)])];
  }
  void make_whole(Lock& lock, int64_t unit);
  // The unit's state is kGathering and it has its buffer; afterwards it is whole, or freed if an error is thrown.
  void gather(Lock& lock, int64_t unit, bool in_parallel);
  void copy_unit(int64_t unit, std::byte* buffer, bool in_parallel) const;
  void copy_parameter(int64_t parameter, std::byte* whole, bool in_parallel) const;
  void prefetch();
  void run_ahead();  // the thread
  bool has_room_for(int64_t unit, int64_t distance) const;
  void show(Slot& slot, void* data);
  std::byte* place_of(const Slot& slot, const UnitState& unit) const;  // in a whole unit
  void free_unit(int64_t unit);
  bool may_free(const UnitState& unit) const {
    return unit.state == State::kWhole && unit.pins == 0 && unit.writes == 0;
  }
  void evict_for(size_t bytes);
  Buffer take_buffer(size_t bytes);
  void give_buffer(Buffer buffer);

  GathererParts parts_;
  mutable std::mutex mutex_;
  std::condition_variable gathered_;
  std::vector<Slot> slots_;  // by parameter; addresses are contexts of storages
  std::vector<UnitState> units_;
  UseOrder order_;
  std::vector<Buffer> spare_;
  size_t resident_ = 0, spare_bytes_ = 0;
  std::deque<int64_t> ahead_;  // units for the thread, in state kGathering
  std::condition_variable wake_thread_;
  bool stop_ = false;
  std::thread thread_;
  int64_t attached_ = 0, bytes_gathered_ = 0, nanoseconds_ = 0;
  std::shared_ptr<UnitGatherer> self_;  // while attached_ > 0
};

struct Managed {
  std::shared_ptr<UnitGatherer> gatherer;
  int64_t parameter = 0;
};
// Who manages what a storage shows. gatherer is null: nobody. The storage must be alive.
Managed find_managed(const c10::StorageImpl* storage);

// Keeps what a tensor shows whole, if somebody manages it.
class PinnedStorage {
 public:
  explicit PinnedStorage(const c10::StorageImpl* storage) : managed_(find_managed(storage)) {
    if (managed_.gatherer) managed_.gatherer->pin(managed_.parameter);
  }
  PinnedStorage(PinnedStorage&& other) noexcept : managed_(std::exchange(other.managed_, {})) {}
  PinnedStorage& operator=(PinnedStorage&&) = delete;
  ~PinnedStorage() {
    if (managed_.gatherer) managed_.gatherer->unpin(managed_.parameter);
  }
  const Managed& managed() const { return managed_; }

 private:
  Managed managed_;
};

}  // namespace trueshard::engine
