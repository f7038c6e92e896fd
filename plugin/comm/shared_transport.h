// SPDX-License-Identifier: BSD-3-Clause
// Role: the transport over a control page and segments, for threads and for processes alike. Made by connect() only.
// Invariants: see transport.h. Releasing a transport marks this rank as left and frees; it waits for nobody.
// Threads: any. allocate() calls are one after the other. Errors: c10::DistBackendError.
#pragma once
#include <unistd.h>

#include <mutex>

#include "plugin/comm/control_page.h"
#include "plugin/comm/liveness.h"
#include "plugin/comm/transport.h"

namespace trueshard::comm {

struct TransportParts {
  int rank = 0;
  int size = 1;
  std::string group;
  std::chrono::milliseconds timeout{0};
  std::shared_ptr<Segments> segments;
  std::shared_ptr<Mapping> control;
  std::unique_ptr<Liveness> liveness;
  std::vector<int64_t> pids;  // of each rank
};

struct Opened {  // a rank's block
  std::shared_ptr<Mapping> mapping;
  std::shared_ptr<PrivateView> view;  // where views were asked for
};

class SharedTransport final : public Transport {
 public:
  explicit SharedTransport(TransportParts parts);
  ~SharedTransport() override;
  // Collective: waits until every rank has mapped the control page.
  void join();

  int rank() const override { return parts_.rank; }
  int size() const override { return parts_.size; }
  const char* kind() const override { return parts_.segments->kind(); }
  const std::string& group_name() const override { return parts_.group; }
  std::chrono::milliseconds timeout() const override { return std::chrono::milliseconds(timeout_ms_.load()); }
  void set_timeout(std::chrono::milliseconds timeout) override;
  std::shared_ptr<Region> allocate(const std::string& name, size_t bytes, Views views) override;
  void fail(const std::string& text) noexcept override;
  bool failed() const noexcept override { return page().failed(); }
  void throw_if_failed() const override;
  void check_process(const char* call) const override;
  bool peer_alive(int rank) const noexcept override;
  std::string how_peer_left(int rank) const override;
  WakeList& wake_list() noexcept override { return wake_list_; }

 private:
  ControlPage& page() const { return *reinterpret_cast<ControlPage*>(parts_.control->data()); }
  std::string here() const;
  std::shared_ptr<Mapping> announce(const std::string& name, size_t bytes, Views views);
  std::vector<Opened> open_all(const std::shared_ptr<Mapping>& own);
  void wait_for(const std::vector<Flag*>& flags, uint64_t number, const std::string& missing);
  std::string announcement_problem(const std::string& name) const;
  Announcement& announcement(int rank) const { return page().line(rank).announcements[allocations_ % 2]; }

  TransportParts parts_;
  std::atomic<int64_t> timeout_ms_{0};
  const int64_t process_ = ::getpid();
  std::mutex allocate_mutex_;
  uint64_t allocations_ = 0;  // guarded by allocate_mutex_
  std::vector<Flag*> joined_, published_, opened_;
  WakeList wake_list_;
};

}  // namespace trueshard::comm
