// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/shared_transport.h"

#include <algorithm>
#include <cstring>

#include "plugin/comm/errors.h"
#include "plugin/comm/patience.h"

namespace trueshard::comm {
namespace {

// Blocks of different ranks start at different offsets within a page and a cache set: with bases at multiples of 2 MiB
// the ranks' blocks fight for the same sets (measured: 3.5 times slower).
constexpr size_t kStagger = 4096 + 128;
size_t stagger_of(int rank) { return kStagger * static_cast<size_t>(2 * (rank % 16) + 1); }

class SharedRegion final : public Region {
 public:
  SharedRegion(std::vector<Opened> blocks, std::vector<size_t> bytes)
      : blocks_(std::move(blocks)), bytes_(std::move(bytes)) {}
  std::byte* data(int rank) const override {
    const auto& mapping = blocks_[static_cast<size_t>(rank)].mapping;
    return mapping == nullptr ? nullptr : mapping->data() + stagger_of(rank);
  }
  size_t bytes(int rank) const override { return bytes_[static_cast<size_t>(rank)]; }
  std::shared_ptr<PrivateView> view(int rank) const override { return blocks_[static_cast<size_t>(rank)].view; }
  size_t view_offset(int rank) const override { return stagger_of(rank); }

 private:
  std::vector<Opened> blocks_;  // without a mapping: the rank asked for nothing
  std::vector<size_t> bytes_;
};

void copy_text(char* to, size_t capacity, const std::string& text) {
  const size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

std::vector<Flag*> flags_of(ControlPage& page, int size, Flag RankLine::*member) {
  std::vector<Flag*> flags;
  for (int r = 0; r < size; ++r) flags.push_back(&(page.line(r).*member));
  return flags;
}

}  // namespace

SharedTransport::SharedTransport(TransportParts parts) : parts_(std::move(parts)) {
  set_timeout(parts_.timeout);
  joined_ = flags_of(page(), size(), &RankLine::joined);
  published_ = flags_of(page(), size(), &RankLine::published);
  opened_ = flags_of(page(), size(), &RankLine::opened);
  for (const auto* flags : {&joined_, &published_, &opened_}) wake_list_.add(this, *flags);
}

SharedTransport::~SharedTransport() {
  page().line(rank()).left.store(1, std::memory_order_release);
  wake_list_.wake_all();  // whoever waits for this rank looks again, and finds that it left
}

std::string SharedTransport::here() const { return where(rank(), size(), group_name()); }

void SharedTransport::set_timeout(std::chrono::milliseconds timeout) {
  constexpr int64_t kLongest = int64_t{1000} * 86400 * 365;  // a year, so that nanoseconds do not overflow
  timeout_ms_.store(std::clamp<int64_t>(timeout.count(), 1, kLongest));
}

void SharedTransport::fail(const std::string& text) noexcept {
  page().fail(rank(), text);
  wake_list_.wake_all();
}

void SharedTransport::check_process(const char* call) const {
  TORCH_CHECK(::getpid() == process_, here(), " ", call, ": process ", ::getpid(),
              " was forked from the one that made the group and is no rank of it; make a new group there, or start "
              "processes with the method 'spawn'");
}

void SharedTransport::throw_if_failed() const {
  if (!failed()) return;
  int reporter = -1;
  const std::string text = page().failure_text(&reporter);
  throw_backend_error(here() + ": the group has failed" +
                      (reporter >= 0 ? ", reported by rank " + std::to_string(reporter) : "") + ": " + text +
                      "; make a new group, this one cannot be used any more");
}

bool SharedTransport::peer_alive(int rank) const noexcept {
  if (rank == parts_.rank) return true;
  return page().line(rank).left.load(std::memory_order_acquire) == 0 && parts_.liveness->alive(rank);
}

std::string SharedTransport::how_peer_left(int rank) const {
  if (page().line(rank).left.load(std::memory_order_acquire) != 0) return "has closed the group";
  return "process " + std::to_string(parts_.pids[static_cast<size_t>(rank)]) + " has ended";
}

void SharedTransport::wait_for(const std::vector<Flag*>& flags, uint64_t number, const std::string& missing) {
  const auto limit = timeout();
  const WaitResult result = wait_for_all({*this, flags.data(), number, limit});
  if (result.outcome == Outcome::kReached) return;
  if (result.outcome != Outcome::kFailed) {
    std::string text = here() + ": " + rank_list(result.late);
    if (result.outcome == Outcome::kTimeout) {
      text += " did not " + missing + " within " + std::to_string(limit.count()) +
              " ms; look there for an earlier error, or give the group a longer timeout";
    } else {
      text +=
          " is gone (" + how_peer_left(result.late.front()) + ") and did not " + missing + "; look there for the cause";
    }
    fail(text);
    throw_backend_error(text);
  }
  throw_if_failed();
}

void SharedTransport::join() {
  post(page().line(rank()).joined, 1);
  wait_for(joined_, 1, "join the group");
  parts_.liveness->watch_locks();
}

std::shared_ptr<Mapping> SharedTransport::announce(const std::string& name, size_t bytes, Views views) {
  Announcement& mine = announcement(rank());
  mine = Announcement{};
  copy_text(mine.name, sizeof mine.name, name);
  mine.ticket.keep_file = views == Views::kPrivate;
  std::shared_ptr<Mapping> own;
  if (bytes > 0) {
    try {
      own = parts_.segments->create(bytes + stagger_of(rank()), &mine.ticket);
    } catch (const std::exception& error) {
      mine.ticket.bytes = 0;
      copy_text(mine.error, sizeof mine.error, text_of(error));
    }
  }
  post(page().line(rank()).published, allocations_);
  return own;
}

std::string SharedTransport::announcement_problem(const std::string& name) const {
  char shown[sizeof(Announcement::name)];
  copy_text(shown, sizeof shown, name);
  for (int r = 0; r < size(); ++r) {
    const Announcement& other = announcement(r);
    if (std::strcmp(other.name, shown) != 0) {
      return std::string("this rank allocates '") + shown + "' but rank " + std::to_string(r) + " allocates '" +
             other.name + "'; all ranks must make the same things in the same order";
    }
  }
  for (int r = 0; r < size(); ++r) {
    const Announcement& other = announcement(r);
    if (other.error[0] != '\0')
      return "allocating '" + name + "' failed on rank " + std::to_string(r) + ": " + other.error;
  }
  return {};
}

std::vector<Opened> SharedTransport::open_all(const std::shared_ptr<Mapping>& own) {
  std::vector<Opened> blocks(static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    auto& block = blocks[static_cast<size_t>(r)];
    const auto& ticket = announcement(r).ticket;
    if (r == rank()) {
      block.mapping = own;
    } else if (ticket.bytes > 0) {
      block.mapping = parts_.segments->open(ticket);
    }
    if (block.mapping && ticket.keep_file)
      block.view = std::make_shared<PrivateView>(block.mapping->file(), block.mapping->bytes());
  }
  return blocks;
}

std::shared_ptr<Region> SharedTransport::allocate(const std::string& name, size_t bytes, Views views) {
  const std::lock_guard<std::mutex> lock(allocate_mutex_);
  throw_if_failed();
  ++allocations_;
  std::shared_ptr<Mapping> own = announce(name, bytes, views);
  Announcement& mine = announcement(rank());
  struct Release {  // once all have opened it, or on the way out
    SharedTransport* self;
    const SegmentTicket* ticket;
    ~Release() {
      if (ticket->bytes > 0) self->parts_.segments->release(*ticket);
    }
  } release{this, &mine.ticket};

  wait_for(published_, allocations_, "allocate '" + name + "'");
  std::string problem = announcement_problem(name);
  std::vector<Opened> blocks;
  if (problem.empty()) {
    try {
      blocks = open_all(own);
    } catch (const std::exception& error) {
      copy_text(mine.open_error, sizeof mine.open_error, text_of(error));
    }
  }
  post(page().line(rank()).opened, allocations_);
  wait_for(opened_, allocations_, "open the memory for '" + name + "'");
  for (int r = 0; r < size() && problem.empty(); ++r) {
    if (announcement(r).open_error[0] == '\0') continue;
    problem =
        "opening the memory for '" + name + "' failed on rank " + std::to_string(r) + ": " + announcement(r).open_error;
  }
  if (!problem.empty()) throw_backend_error(here() + ": " + problem);
  std::vector<size_t> sizes;
  for (int r = 0; r < size(); ++r) {
    const size_t whole = announcement(r).ticket.bytes;
    sizes.push_back(whole == 0 ? 0 : whole - stagger_of(r));
  }
  for (auto& block : blocks) {
    // Ranks that are threads have the maker's mapping: it closes the file, all views being made.
    if (block.view && (block.mapping == own || parts_.segments->closes_alone())) block.mapping->close_file();
  }
  return std::make_shared<SharedRegion>(std::move(blocks), std::move(sizes));
}

}  // namespace trueshard::comm
