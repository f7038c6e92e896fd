// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/work.h"

#include <pthread.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

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

WorkQueue::~WorkQueue() {
  stop(std::make_exception_ptr(
      std::runtime_error("trueshard: the process group was destroyed before this operation began")));
  if (worker_.joinable()) worker_.join();
}

// Called with running_ set; clears it before the work is seen to be complete: whoever has waited for the last work
// finds the queue idle and may let the group go.
void WorkQueue::run(CollectiveWork& work) {
  std::exception_ptr error;
  try {
    work.operation();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
  }
  changed_.notify_all();
  work.complete(error);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --incomplete_;
  }
  changed_.notify_all();
}

void WorkQueue::start(const c10::intrusive_ptr<CollectiveWork>& work) {
  std::exception_ptr stopped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped = stopped_;
    if (!stopped) enqueue(work);
  }
  if (stopped) work->complete(stopped);
}

void WorkQueue::enqueue(const c10::intrusive_ptr<CollectiveWork>& work) {
  waiting_.push_back(work);
  ++incomplete_;
  if (!worker_.joinable()) worker_ = std::thread([this] { run_worker(); });
  changed_.notify_all();
}

void WorkQueue::start_here_if_idle(const c10::intrusive_ptr<CollectiveWork>& work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_ && !running_ && waiting_.empty()) {
      running_ = true;
      ++incomplete_;
    } else if (!stopped_) {
      enqueue(work);
      return;
    } else {
      std::rethrow_exception(stopped_);
    }
  }
  run(*work);
  if (const std::exception_ptr error = work->exception()) std::rethrow_exception(error);
}

bool WorkQueue::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !running_ && waiting_.empty();
}

void WorkQueue::wait_until_complete() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return incomplete_ == 0; });
}

void WorkQueue::stop(std::exception_ptr error) {
  std::deque<c10::intrusive_ptr<CollectiveWork>> dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_) stopped_ = error;
    dropped.swap(waiting_);
    incomplete_ -= static_cast<int64_t>(dropped.size());
  }
  changed_.notify_all();
  for (const auto& work : dropped) work->complete(error);
}

void WorkQueue::run_worker() {
  pthread_setname_np(pthread_self(), "trueshard");
  request_time_slice(worker_time_slice_us());
  for (;;) {
    c10::intrusive_ptr<CollectiveWork> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopped_ || (!running_ && !waiting_.empty()); });
      if (stopped_) return;
      work = std::move(waiting_.front());
      waiting_.pop_front();
      running_ = true;
    }
    run(*work);
  }
}

}  // namespace trueshard::comm
