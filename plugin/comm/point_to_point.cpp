// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/point_to_point.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "plugin/comm/errors.h"
#include "plugin/comm/mailbox.h"
#include "plugin/comm/transfers.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {

struct PointToPoint::State final : GiveUp {  // shared with the worker, which may outlive the owner by a moment
  explicit State(std::shared_ptr<Transport> the_transport)
      : transport(std::move(the_transport)), mailbox(transport), transfers(transport, mailbox) {}

  // Asked while the worker sleeps: whether it must look at something else than the bell.
  bool operator()() override {
    transfers.forget_gone();
    return transport->failed() || transfers.empty() || !transfers.problem().empty();
  }
  void run();
  void fail_all();

  std::shared_ptr<Transport> transport;
  Mailbox mailbox;
  Transfers transfers;  // the worker's
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Transfer> started;  // guarded by mutex, as what follows
  int64_t incomplete = 0;         // as last seen by the worker, and what was started since
  std::exception_ptr stopped;
};

void PointToPoint::State::fail_all() {
  if (!transport->failed()) {
    const std::string text = transfers.problem();
    if (text.empty()) return;
    transport->fail(text);
    try {
      throw_backend_error(text);
    } catch (...) {
      return transfers.end_all(std::current_exception());
    }
  }
  try {
    transport->throw_if_failed();
  } catch (...) {
    transfers.end_all(std::current_exception());
  }
}

void PointToPoint::State::run() {
  pthread_setname_np(pthread_self(), "trueshard p2p");
  request_time_slice(worker_time_slice_us());
  const bool alone = transport->size() == 1;
  for (bool moved = true;;) {
    const uint64_t seen = mailbox.rung();
    std::vector<Transfer> fresh;
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (transfers.empty() && started.empty()) {
        incomplete = 0;
        changed.notify_all();
        changed.wait(lock, [this] { return stopped || !started.empty(); });
      }
      if (stopped) break;
      fresh.swap(started);
    }
    moved = !fresh.empty();
    for (Transfer& transfer : fresh) transfers.add(std::move(transfer));
    moved = transfers.step() || moved;
    if (moved || transfers.empty()) continue;
    Flag& bell = mailbox.bell(transport->rank());
    if (wait(bell, seen + 1, {alone ? 1 : transport->size(), transfers.next_deadline_ns()}, *this)) continue;
    if (!transfers.step()) fail_all();  // a last look: what is gone may have left something
  }
  transfers.end_all(stopped);
  const std::lock_guard<std::mutex> lock(mutex);
  incomplete = 0;
  changed.notify_all();
}

PointToPoint::PointToPoint(std::shared_ptr<Transport> transport)
    : state_(std::make_shared<State>(std::move(transport))) {}

PointToPoint::~PointToPoint() {
  if (!state_) return;
  stop(std::make_exception_ptr(
      std::runtime_error("trueshard: the process group was destroyed before this transfer ended")));
  join();
}

void PointToPoint::join() { join_quietly(&worker_); }

void PointToPoint::start(Transfer transfer) {
  transfer.start_ns = observe::now_ns();
  transfer.deadline_ns = transfer.start_ns + state_->transport->timeout().count() * 1000000;
  std::exception_ptr stopped;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    stopped = state_->stopped;
    if (!stopped) {
      ++state_->incomplete;
      if (!worker_.joinable()) worker_ = std::thread([state = state_] { state->run(); });
      state_->started.push_back(std::move(transfer));
      state_->changed.notify_all();
    }
  }
  if (stopped) return transfer.work->complete(stopped);
  state_->mailbox.ring(state_->transport->rank());
}

void PointToPoint::wait_until_complete() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->incomplete == 0; });
}

void PointToPoint::stop(std::exception_ptr error) {
  std::vector<Transfer> dropped;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->stopped) state_->stopped = error;
    dropped.swap(state_->started);
    state_->changed.notify_all();
  }
  for (Transfer& transfer : dropped) transfer.work->complete(error);
  state_->mailbox.ring(state_->transport->rank());
}

void PointToPoint::abandon() noexcept {
  new std::shared_ptr<State>(std::move(state_));
  if (worker_.joinable()) worker_.detach();
}

}  // namespace trueshard::comm
