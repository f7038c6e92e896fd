// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/unit_gatherer.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <unordered_map>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/parallel.h"
#include "plugin/observe/trace.h"

namespace trueshard::engine {

namespace {

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// All managed storages of the process. Looked up for every operator that touches a managed parameter.
struct Table {
  std::shared_mutex mutex;
  struct Entry {
    UnitGatherer* gatherer;
    int64_t parameter;
  };
  std::unordered_map<const c10::StorageImpl*, Entry> of;
};
Table& table() {
  static auto* the_table = new Table;  // outlives modules in static objects
  return *the_table;
}

std::string freed_text(const std::string& name) {
  return "trueshard: parameter '" + name +
         "' is sharded (Stage::Zero3) and not whole at the moment. Operators make it whole by themselves; for raw "
         "pointers, torch::save and the like use a FullParametersGuard, full_state_dict() or save_checkpoint(). Views "
         "and "
         "graphs from before shard() must be made anew";
}

}  // namespace

Managed find_managed(const c10::StorageImpl* storage) {
  auto& all = table();
  const std::shared_lock<std::shared_mutex> lock(all.mutex);
  const auto found = all.of.find(storage);
  if (found == all.of.end()) return {};
  return {found->second.gatherer->shared_from_this(), found->second.parameter};
}

UnitGatherer::UnitGatherer(GathererParts parts)
    : parts_(std::move(parts)),
      slots_(parts_.parameters.size()),
      units_(parts_.units.units.size()),
      order_(static_cast<int64_t>(parts_.units.units.size())) {
  for (size_t u = 0; u < units_.size(); ++u) {
    for (const auto p : parts_.units.units[u].parameters) {
      auto& slot = slots_[static_cast<size_t>(p)];
      const auto& spec = parts_.parameters[static_cast<size_t>(p)];
      slot.owner = this;
      slot.parameter = p;
      slot.offset = units_[u].bytes;
      slot.text = freed_text(spec.name);
      if (spec.view != nullptr) continue;
      units_[u].bytes += aligned(static_cast<size_t>(spec.numel) * c10::elementSize(spec.compute_dtype));
    }
  }
}

UnitGatherer::~UnitGatherer() {
  if (!thread_.joinable()) return;
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  wake_thread_.notify_all();
  thread_.join();
}

// ---- storages ------------------------------------------------------------------------------------------------------

// The storage has died, or something else was put into it.
void UnitGatherer::storage_gone(void* context) {
  auto& slot = *static_cast<Slot*>(context);
  auto& self = *slot.owner;
  std::shared_ptr<UnitGatherer> last;  // may be the last owner: destroyed after the lock is released
  const Lock lock(self.mutex_);
  {
    auto& all = table();
    const std::unique_lock<std::shared_mutex> table_lock(all.mutex);
    all.of.erase(slot.storage);
  }
  slot.storage = nullptr;
  if (slot.written) {
    slot.written = false;
    --self.unit_of(slot.parameter).writes;
  }
  if (--self.attached_ == 0) last = std::move(self.self_);
}

// Swaps what the storage points to; the context stays, so that the storage's end is still noticed. Null: freed.
void UnitGatherer::show(Slot& slot, void* data) {
  auto* context = slot.storage->_mutable_data_ptr_no_checks().release_context();
  slot.storage->set_data_ptr_noswap(at::DataPtr(data, context, &storage_gone, c10::Device(c10::kCPU)));
  if (data == nullptr) {
    slot.storage->release_data_and_set_meta_custom_data_ptr_error_msg_(slot.text);
  } else {
    slot.storage->clear_data_ptr_access_error_msg_();
  }
}

void UnitGatherer::attach(int64_t parameter, c10::StorageImpl* storage) {
  auto& slot = slots_[static_cast<size_t>(parameter)];
  if (attached(parameter, storage)) return;
  at::DataPtr old;  // freed at the end: may be another gatherer's, whose lock must not be taken under ours
  {
    const Lock lock(mutex_);
    old = std::move(storage->_mutable_data_ptr_no_checks());
    slot.storage = storage;
    storage->set_data_ptr_noswap(at::DataPtr(nullptr, &slot, &storage_gone, c10::Device(c10::kCPU)));
    show(slot, nullptr);
    // Its place in a whole unit holds something else. Where the unit can not be freed, masters_changed() will.
    const int64_t unit = parts_.units.unit_of[static_cast<size_t>(parameter)];
    if (may_free(units_[static_cast<size_t>(unit)])) free_unit(unit);
    if (attached_++ == 0) self_ = shared_from_this();
  }
  old.clear();
  auto& all = table();
  const std::unique_lock<std::shared_mutex> table_lock(all.mutex);
  all.of[storage] = {this, parameter};
}

void UnitGatherer::detach(int64_t parameter) {
  c10::StorageImpl* storage = nullptr;
  {
    const Lock lock(mutex_);
    storage = slots_[static_cast<size_t>(parameter)].storage;
  }
  if (storage == nullptr) return;
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, c10::Device(c10::kCPU)));  // calls storage_gone
}

bool UnitGatherer::attached(int64_t parameter, const c10::StorageImpl* storage) const {
  const Lock lock(mutex_);
  return storage != nullptr && slots_[static_cast<size_t>(parameter)].storage == storage;
}

// ---- units ---------------------------------------------------------------------------------------------------------

void UnitGatherer::pin(int64_t parameter) {
  const int64_t u = parts_.units.unit_of[static_cast<size_t>(parameter)];
  Lock lock(mutex_);
  auto& unit = units_[static_cast<size_t>(u)];
  ++unit.pins;
  order_.used(u);
  if (unit.state != State::kWhole) {
    try {
      make_whole(lock, u);
    } catch (...) {
      --unit.pins;
      throw;
    }
  }
  if (parts_.prefetch_units > 0) prefetch();
}

void UnitGatherer::unpin(int64_t parameter) noexcept {
  const int64_t u = parts_.units.unit_of[static_cast<size_t>(parameter)];
  const Lock lock(mutex_);
  auto& unit = units_[static_cast<size_t>(u)];
  --unit.pins;
  if (!may_free(unit)) return;
  if (unit.stale || (order_.predicts() && order_.distance(u) == UseOrder::kNever)) free_unit(u);
  evict_for(0);
}

void UnitGatherer::make_whole(Lock& lock, int64_t u) {
  auto& unit = units_[static_cast<size_t>(u)];
  while (unit.state == State::kGathering) gathered_.wait(lock);
  if (unit.state == State::kWhole) return;
  unit.buffer = take_buffer(unit.bytes);
  unit.state = State::kGathering;
  gather(lock, u, /*in_parallel=*/true);
}

void UnitGatherer::gather(Lock& lock, int64_t u, bool in_parallel) {
  auto& unit = units_[static_cast<size_t>(u)];
  auto* buffer = static_cast<std::byte*>(unit.buffer.data.get());
  lock.unlock();
  std::exception_ptr error;
  const int64_t start = observe::now_ns();
  try {
    parts_.epoch->wait();
    copy_unit(u, buffer, in_parallel);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  nanoseconds_ += observe::now_ns() - start;
  if (error) {
    unit.state = State::kFreed;
    give_buffer(std::move(unit.buffer));
  } else {
    unit.state = State::kWhole;
    unit.stale = false;
    for (const auto p : parts_.units.units[static_cast<size_t>(u)].parameters) {
      auto& slot = slots_[static_cast<size_t>(p)];
      const auto& spec = parts_.parameters[static_cast<size_t>(p)];
      if (slot.storage != nullptr) show(slot, place_of(slot, unit));
      if (spec.view != nullptr) continue;
      const auto item = static_cast<int64_t>(c10::elementSize(spec.stored_dtype));
      for (const auto& piece : spec.pieces) bytes_gathered_ += piece.local ? 0 : piece.range.size() * item;
    }
  }
  gathered_.notify_all();
  if (error) std::rethrow_exception(error);
}

void UnitGatherer::copy_unit(int64_t u, std::byte* buffer, bool in_parallel) const {
  for (const auto p : parts_.units.units[static_cast<size_t>(u)].parameters) {
    if (spec(p).view == nullptr) copy_parameter(p, buffer + slots_[static_cast<size_t>(p)].offset, in_parallel);
  }
}

void UnitGatherer::copy_parameter(int64_t p, std::byte* whole, bool in_parallel) const {
  const auto& from_spec = spec(p);
  const auto from = kernel_dtype(from_spec.stored_dtype), to = kernel_dtype(from_spec.compute_dtype);
  for (const auto& piece : from_spec.pieces) {
    const auto copy = [&](int64_t begin, int64_t end) {
      kernels::kernels().cast(piece.master + begin * kernels::itemsize(from), from,
                              whole + (piece.range.begin + begin) * kernels::itemsize(to), to, end - begin);
    };
    if (in_parallel) {
      for_blocks(piece.range.size(), copy);
    } else {
      copy(0, piece.range.size());
    }
  }
}

// ---- ahead of use --------------------------------------------------------------------------------------------------

// Only what is needed later than the unit may give way to it.
bool UnitGatherer::has_room_for(int64_t u, int64_t distance) const {
  auto free = parts_.resident_bytes - static_cast<int64_t>(resident_);
  for (size_t other = 0; other < units_.size(); ++other) {
    if (may_free(units_[other]) && order_.distance(static_cast<int64_t>(other)) > distance)
      free += static_cast<int64_t>(units_[other].buffer.capacity);
  }
  return free >= static_cast<int64_t>(units_[static_cast<size_t>(u)].bytes);
}

void UnitGatherer::prefetch() {
  for (int64_t ahead = 1; ahead <= parts_.prefetch_units; ++ahead) {
    const int64_t u = order_.upcoming(ahead);
    if (u < 0) return;
    auto& unit = units_[static_cast<size_t>(u)];
    if (unit.state != State::kFreed || unit.bytes == 0) continue;
    if (!has_room_for(u, ahead)) return;
    unit.buffer = take_buffer(unit.bytes);
    unit.state = State::kGathering;
    ahead_.push_back(u);
    if (!thread_.joinable()) thread_ = std::thread([this] { run_ahead(); });
    wake_thread_.notify_one();
  }
}

void UnitGatherer::run_ahead() {
  Lock lock(mutex_);
  while (true) {
    wake_thread_.wait(lock, [this] { return stop_ || !ahead_.empty(); });
    if (stop_) return;
    const int64_t u = ahead_.front();
    try {
      gather(lock, u, /*in_parallel=*/false);
    } catch (const std::exception&) {
      // Whoever needs the unit tries again, and gets the error.
    }
    ahead_.pop_front();
    gathered_.notify_all();
  }
}

void UnitGatherer::settle() {
  Lock lock(mutex_);
  gathered_.wait(lock, [this] { return ahead_.empty(); });
}

void UnitGatherer::free_unit(int64_t u) {
  auto& unit = units_[static_cast<size_t>(u)];
  for (const auto p : parts_.units.units[static_cast<size_t>(u)].parameters) {
    auto& slot = slots_[static_cast<size_t>(p)];
    if (slot.storage != nullptr) show(slot, nullptr);
  }
  unit.state = State::kFreed;
  unit.stale = false;
  if (unit.bytes > 0) observe::chaos_poison(static_cast<std::byte*>(unit.buffer.data.get()), unit.bytes);
  give_buffer(std::move(unit.buffer));
}

void UnitGatherer::evict_for(size_t bytes) {
  while (resident_ + bytes > static_cast<size_t>(parts_.resident_bytes)) {
    int64_t victim = -1, farthest = -1;
    for (size_t u = 0; u < units_.size(); ++u) {
      if (!may_free(units_[u]) || units_[u].buffer.capacity == 0) continue;
      const int64_t distance = order_.distance(static_cast<int64_t>(u));
      if (distance > farthest) {
        farthest = distance;
        victim = static_cast<int64_t>(u);
      }
    }
    if (victim < 0) return;  // all that is whole is in use
    free_unit(victim);
  }
}

UnitGatherer::Buffer UnitGatherer::take_buffer(size_t bytes) {
  if (bytes == 0) return {};
  evict_for(bytes);
  auto best = spare_.end();
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    if (it->capacity >= bytes && (best == spare_.end() || it->capacity < best->capacity)) best = it;
  }
  Buffer buffer;
  if (best != spare_.end() && best->capacity <= 2 * bytes + (size_t{1} << 20)) {
    buffer = std::move(*best);
    spare_.erase(best);
    spare_bytes_ -= buffer.capacity;
  } else {
    while (!spare_.empty() && resident_ + spare_bytes_ + bytes > static_cast<size_t>(parts_.resident_bytes)) {
      spare_bytes_ -= spare_.back().capacity;
      spare_.pop_back();
    }
    buffer = {c10::GetAllocator(c10::kCPU)->allocate(bytes), bytes};
  }
  resident_ += buffer.capacity;
  return buffer;
}

// Kept for the next unit, as far as the budget goes: fresh memory would cost a page fault for every 4 KB.
void UnitGatherer::give_buffer(Buffer buffer) {
  if (buffer.capacity == 0) return;
  resident_ -= buffer.capacity;
  if (resident_ + spare_bytes_ + buffer.capacity > static_cast<size_t>(parts_.resident_bytes)) return;
  spare_bytes_ += buffer.capacity;
  spare_.push_back(std::move(buffer));
}

const std::byte* UnitGatherer::contents(int64_t parameter) const {
  const Lock lock(mutex_);
  const auto u = parts_.units.unit_of[static_cast<size_t>(parameter)];
  const auto& unit = units_[static_cast<size_t>(u)];
  TORCH_INTERNAL_ASSERT(unit.state == State::kWhole, "contents of a unit that is not whole");
  return place_of(slots_[static_cast<size_t>(parameter)], unit);
}

std::byte* UnitGatherer::place_of(const Slot& slot, const UnitState& unit) const {
  auto* view = spec(slot.parameter).view;
  return view != nullptr ? view : static_cast<std::byte*>(unit.buffer.data.get()) + slot.offset;
}

// ---- writes --------------------------------------------------------------------------------------------------------

void UnitGatherer::note_write(int64_t parameter) {
  const Lock lock(mutex_);
  auto& slot = slots_[static_cast<size_t>(parameter)];
  if (slot.written || slot.storage == nullptr) return;
  slot.written = true;
  ++unit_of(parameter).writes;
}

bool UnitGatherer::agrees_with_masters(int64_t parameter) {
  parts_.epoch->wait();
  if (const auto* view = spec(parameter).view) {
    const auto item = static_cast<int64_t>(c10::elementSize(spec(parameter).compute_dtype));
    const auto& pieces = spec(parameter).pieces;
    return std::all_of(pieces.begin(), pieces.end(), [&](const GatherPiece& piece) {
      return std::memcmp(view + piece.range.begin * item, piece.master,
                         static_cast<size_t>(piece.range.size() * item)) == 0;
    });
  }
  const auto bytes = static_cast<size_t>(spec(parameter).numel) * c10::elementSize(spec(parameter).compute_dtype);
  const auto fresh = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  copy_parameter(parameter, static_cast<std::byte*>(fresh.get()), /*in_parallel=*/true);
  return std::memcmp(fresh.get(), contents(parameter), bytes) == 0;
}

bool UnitGatherer::written(int64_t parameter) const {
  const Lock lock(mutex_);
  return slots_[static_cast<size_t>(parameter)].written;
}

void UnitGatherer::forget_write(int64_t parameter) {
  const Lock lock(mutex_);
  auto& slot = slots_[static_cast<size_t>(parameter)];
  if (!slot.written) return;
  slot.written = false;
  --unit_of(parameter).writes;
}

void UnitGatherer::masters_changed() {
  parts_.epoch->advance();
  const Lock lock(mutex_);
  for (auto& slot : slots_) {
    if (!slot.written) continue;
    slot.written = false;
    --unit_of(slot.parameter).writes;
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    if (may_free(units_[u])) {
      free_unit(static_cast<int64_t>(u));
    } else {
      units_[u].stale = units_[u].state == State::kWhole;
    }
  }
  if (parts_.view) parts_.view->drop();
  order_.begin_round();
}

int64_t UnitGatherer::resident_bytes() const {
  const Lock lock(mutex_);
  return static_cast<int64_t>(resident_ + spare_bytes_);
}
int64_t UnitGatherer::bytes_gathered() const {
  const Lock lock(mutex_);
  return bytes_gathered_;
}
double UnitGatherer::seconds() const {
  const Lock lock(mutex_);
  return static_cast<double>(nanoseconds_) * 1e-9;
}

}  // namespace trueshard::engine
