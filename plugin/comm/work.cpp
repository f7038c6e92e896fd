// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/work.h"

#include <pthread.h>

#include <atomic>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include "plugin/comm/backend.h"
#include "plugin/comm/waiter.h"

namespace trueshard::comm {

void CollectiveWork::complete_future(const c10::intrusive_ptr<c10::ivalue::Future>& future,
                                     const std::exception_ptr& error) const {
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  std::unique_lock<std::mutex> lock(future_mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (future_due_) {
      lock.unlock();
      complete_future(future_, exception());
    }
  }
  return future_;
}

void CollectiveWork::abort() {
  TORCH_CHECK(false,
              "trueshard: one collective cannot be taken back, the other ranks may have begun it; abort() the backend");
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (timeout == kNoTimeout) {
    cv_.wait(lock, [this] { return completed_; });
  } else if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) {
    TORCH_CHECK(false, "trueshard: the operation has not ended within the ", timeout.count(),
                " ms given to wait(); it goes on, wait again or give the group a shorter timeout");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

bool CollectiveWork::isCompleted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool CollectiveWork::isSuccess() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !exception_;
}

std::exception_ptr CollectiveWork::exception() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return exception_;
}

void CollectiveWork::complete(std::exception_ptr error) {
  operation = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_ = true;
    exception_ = error;
    if (recordFunctionEndCallback_) {
      recordFunctionEndCallback_();
      recordFunctionEndCallback_ = nullptr;
    }
  }
  cv_.notify_all();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    future_due_ = true;
    future = future_;
  }
  if (future) complete_future(future, error);
}

int CollectiveWork::sourceRank() const {
  TORCH_CHECK(source >= 0, "trueshard: only work that received something has a source rank");
  return source;
}

namespace {
std::atomic<void (*)(void (*)(void*), void*)> blocking_call{nullptr};
}  // namespace

void set_blocking_call(void (*call)(void (*function)(void*), void* argument)) noexcept { blocking_call = call; }

void join_quietly(std::thread* thread) {
  if (!thread->joinable()) return;
  if (thread->get_id() == std::this_thread::get_id()) return thread->detach();
  const auto join = [](void* argument) { static_cast<std::thread*>(argument)->join(); };
  if (const auto call = blocking_call.load()) {
    call(join, thread);
  } else {
    join(thread);
  }
}

WorkQueue::WorkQueue() : state_(std::make_shared<State>()) {}

WorkQueue::~WorkQueue() {
  if (!state_) return;
  stop(std::make_exception_ptr(
      std::runtime_error("trueshard: the process group was destroyed before this operation began")));
  join();
}

void WorkQueue::join() { join_quietly(&worker_); }

void WorkQueue::abandon() noexcept {
  new std::shared_ptr<State>(std::move(state_));  // its condition variable may have a waiter that will never leave
  if (worker_.joinable()) worker_.detach();
}

// Called with running set; clears it before the work is seen to be complete: whoever has waited for the last work
// finds the queue idle and may let the group go.
void WorkQueue::run(State& state, CollectiveWork& work) {
  std::exception_ptr error;
  try {
    work.operation();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.running = false;
  }
  state.changed.notify_all();
  work.complete(error);
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    --state.incomplete;
  }
  state.changed.notify_all();
}

void WorkQueue::start(const c10::intrusive_ptr<CollectiveWork>& work) {
  std::exception_ptr stopped;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    stopped = state_->stopped;
    if (!stopped) enqueue(work);
  }
  if (stopped) work->complete(stopped);
}

void WorkQueue::enqueue(const c10::intrusive_ptr<CollectiveWork>& work) {
  state_->waiting.push_back(work);
  ++state_->incomplete;
  if (!worker_.joinable()) worker_ = std::thread([state = state_] { run_worker(*state); });
  state_->changed.notify_all();
}

void WorkQueue::start_here_if_idle(const c10::intrusive_ptr<CollectiveWork>& work) {
  const std::shared_ptr<State> state = state_;  // a callback may destroy the queue
  {
    const std::lock_guard<std::mutex> lock(state->mutex);
    if (!state->stopped && !state->running && state->waiting.empty()) {
      state->running = true;
      ++state->incomplete;
    } else if (!state->stopped) {
      enqueue(work);
      return;
    } else {
      std::rethrow_exception(state->stopped);
    }
  }
  run(*state, *work);
  if (const std::exception_ptr error = work->exception()) std::rethrow_exception(error);
}

bool WorkQueue::idle() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return !state_->running && state_->waiting.empty();
}

void WorkQueue::wait_until_complete() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->incomplete == 0; });
}

void WorkQueue::stop(std::exception_ptr error) {
  std::deque<c10::intrusive_ptr<CollectiveWork>> dropped;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->stopped) state_->stopped = error;
    dropped.swap(state_->waiting);
    state_->incomplete -= static_cast<int64_t>(dropped.size());
  }
  state_->changed.notify_all();
  for (const auto& work : dropped) work->complete(error);
}

void WorkQueue::run_worker(State& state) {
  pthread_setname_np(pthread_self(), "trueshard");
  request_time_slice(worker_time_slice_us());
  for (;;) {
    c10::intrusive_ptr<CollectiveWork> work;
    {
      std::unique_lock<std::mutex> lock(state.mutex);
      state.changed.wait(lock, [&state] { return state.stopped || (!state.running && !state.waiting.empty()); });
      if (state.stopped) return;
      work = std::move(state.waiting.front());
      state.waiting.pop_front();
      state.running = true;
    }
    run(state, *work);
  }
}

}  // namespace trueshard::comm
