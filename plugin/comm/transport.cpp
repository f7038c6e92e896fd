// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/transport.h"

#include <algorithm>

#include "plugin/comm/connect.h"
#include "plugin/comm/errors.h"
#include "plugin/comm/shared_transport.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

constexpr char kOk[] = "ok";

// One rank's way through the meeting; lives on the stack of connect_as().
class Meeting {
 public:
  Meeting(const StoreEnds& ends, const ConnectTestOptions& options) : ends_(ends), options_(options), exchange_(ends) {}
  ~Meeting() {
    if (segments_ != nullptr && control_ticket_.bytes > 0) segments_->release(control_ticket_);
    if (probe_segments_ != nullptr) probe_segments_->release(probe_);
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  std::shared_ptr<Transport> run() {
    introduce();
    check_hosts();
    watch_peers();
    const Identity& me = peers_[self()];
    const bool threads =
        std::all_of(peers_.begin(), peers_.end(), [&](const Identity& p) { return p.same_process(me); });
    if (threads) {
      share_control(thread_segments());
    } else if (!open_probes()) {
      share_control(file_segments());
    }
    std::shared_ptr<SharedTransport> transport = make_transport();
    transport->join();
    // Everybody has read everything and has mapped the page.
    if (ends_.rank == 0) exchange_.forget({"id", "probe", "control", "mapped"});
    return transport;
  }

 private:
  size_t self() const { return static_cast<size_t>(ends_.rank); }
  std::string here() const { return where(ends_.rank, ends_.size, ends_.group); }

  void introduce() {
    Identity me = this_process();
    if (!options_.hostname.empty()) me.hostname = options_.hostname;
    if (options_.other_pid_namespace) me.pid_namespace = static_cast<uint64_t>(ends_.rank) + 1;
    probe_segments_ = memfd_segments();
    const size_t bytes = ends_.rank == 0 ? ControlPage::bytes(ends_.size) : 4096;
    try {
      probe_mapping_ = probe_segments_->create(bytes, &probe_);
    } catch (const std::exception& error) {
      probe_segments_ = nullptr;
      throw_backend_error(here() + ": " + text_of(error));
    }
    me.probe = probe_;
    exchange_.publish("id", me.encode());
    for (const std::string& text : exchange_.collect("id")) peers_.push_back(Identity::decode(text));
  }

  void check_hosts() const {
    for (int r = 1; r < ends_.size; ++r) {
      const Identity& other = peers_[static_cast<size_t>(r)];
      if (other.same_host(peers_[0])) continue;
      throw_backend_error(here() + ": rank 0 runs on host '" + peers_[0].hostname + "' and rank " + std::to_string(r) +
                          " on host '" + other.hostname +
                          "', but all ranks of a group must run on one host in this version; start them on one host");
    }
  }

  void watch_peers() {
    liveness_ = std::make_unique<Liveness>(peers_, ends_.rank);
    exchange_.watch([this]() -> std::string {
      for (int r = 0; r < ends_.size; ++r) {
        if (liveness_->alive(r)) continue;
        return here() + ": rank " + std::to_string(r) + " is gone (process " +
               std::to_string(peers_[static_cast<size_t>(r)].pid) +
               " has ended) while the group was made; look there for the cause";
      }
      return {};
    });
  }

  // Whether every rank can open every other's segments through /proc.
  bool open_probes() {
    std::string verdict = kOk;
    std::shared_ptr<Mapping> control = probe_mapping_;
    try {
      for (int r = 0; r < ends_.size; ++r) {
        const Identity& peer = peers_[static_cast<size_t>(r)];
        TORCH_CHECK(peer.pid_namespace == peers_[self()].pid_namespace, "another pid namespace");
        if (r == ends_.rank) continue;
        std::shared_ptr<Mapping> mapping = probe_segments_->open(peer.probe);
        if (r == 0) control = std::move(mapping);
      }
    } catch (const std::exception& error) {
      verdict = text_of(error);
    }
    exchange_.publish("probe", verdict);
    const std::vector<std::string> verdicts = exchange_.collect("probe");
    if (std::any_of(verdicts.begin(), verdicts.end(), [](const std::string& v) { return v != kOk; })) return false;
    segments_ = memfd_segments();
    control_ = std::move(control);
    return true;
  }

  // Rank 0 makes the control page in the given way; the others open it.
  void share_control(std::unique_ptr<Segments> segments) {
    segments_ = std::move(segments);
    std::string verdict = kOk;
    if (ends_.rank == 0) {
      try {
        control_ = segments_->create(ControlPage::bytes(ends_.size), &control_ticket_);
      } catch (const std::exception& error) {
        control_ticket_ = SegmentTicket{};
        verdict = text_of(error);
      }
      exchange_.publish("control", control_ticket_.encode());
    } else {
      try {
        control_ = segments_->open(SegmentTicket::decode(exchange_.fetch("control", 0)));
      } catch (const c10::DistBackendError&) {
        throw;  // the exchange failed, not the opening
      } catch (const std::exception& error) {
        verdict = text_of(error);
      }
    }
    exchange_.publish("mapped", verdict);
    const std::vector<std::string> verdicts = exchange_.collect("mapped");
    for (int r = 0; r < ends_.size; ++r) {
      if (verdicts[static_cast<size_t>(r)] == kOk) continue;
      throw_backend_error(here() + ": rank " + std::to_string(r) + " cannot share memory with the others (" +
                          verdicts[static_cast<size_t>(r)] +
                          "); the ranks must run as one user and see the same /proc or the same /dev/shm");
    }
  }

  std::shared_ptr<SharedTransport> make_transport() {
    TransportParts parts;
    parts.rank = ends_.rank;
    parts.size = ends_.size;
    parts.group = ends_.group;
    parts.timeout = ends_.timeout;
    for (const Identity& peer : peers_) parts.pids.push_back(peer.pid);
    if (control_->file() >= 0) liveness_->hold_lock(control_->file());
    exchange_.watch(nullptr);
    parts.liveness = std::move(liveness_);
    parts.control = control_;
    parts.segments = segments_;
    return std::make_shared<SharedTransport>(std::move(parts));
  }

  const StoreEnds& ends_;
  const ConnectTestOptions& options_;
  StoreExchange exchange_;
  std::vector<Identity> peers_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Segments> probe_segments_;
  std::shared_ptr<Segments> segments_;
  std::shared_ptr<Mapping> probe_mapping_, control_;
  SegmentTicket probe_, control_ticket_;
};

std::shared_ptr<Transport> connect_alone(const StoreEnds& ends) {
  TransportParts parts;
  parts.group = ends.group;
  parts.timeout = ends.timeout;
  parts.segments = thread_segments();
  SegmentTicket ticket;
  parts.control = parts.segments->create(ControlPage::bytes(1), &ticket);
  parts.segments->release(ticket);
  parts.liveness = std::make_unique<Liveness>(std::vector<Identity>{Identity{}}, 0);
  parts.pids = {0};
  return std::make_shared<SharedTransport>(std::move(parts));
}

}  // namespace

std::shared_ptr<Transport> connect_as(const StoreEnds& ends, const ConnectTestOptions& options) {
  observe::chaos();  // a malformed TRUESHARD_CHAOS or an unwritable TRUESHARD_TRACE is an error here, not in
                     // mid-training
  observe::trace_enabled();
  TORCH_CHECK(ends.size >= 1 && ends.rank >= 0 && ends.rank < ends.size, "trueshard: rank ", ends.rank, " of ",
              ends.size, " ranks is not possible; expected 0 <= rank < world size");
  if (ends.size == 1) return connect_alone(ends);
  TORCH_CHECK(ends.store, "trueshard[rank ", ends.rank, "/", ends.size, "] group '", ends.group,
              "': a group of several ranks needs a store; pass one that all ranks share");
  return Meeting(ends, options).run();
}

std::shared_ptr<Transport> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const std::string& group_name, std::chrono::milliseconds timeout) {
  return connect_as({store, rank, size, group_name, timeout}, {});
}

}  // namespace trueshard::comm
