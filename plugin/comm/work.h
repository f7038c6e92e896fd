// SPDX-License-Identifier: BSD-3-Clause
// Role: one collective that was started, and the queue of those that have not ended.
// Invariants: I1 operations run one at a time, in the order they were given. I2 a synchronous one runs on its caller's
// thread when nothing else runs or waits. I3 wait() on a failed operation throws its error every time. I4 stop() ends
// what has not begun with an error and waits only for the worker thread, never for another rank. I5 the queue may be
// destroyed by a callback on its own worker, and in a forked child, where that thread does not exist. Threads: Work
// from any thread; the queue from one caller at a time beside its own worker. Errors: what the operation threw.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace trueshard::comm {

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs)
      : Work(rank, type, title, inputs), outputs_(std::move(outputs)) {}
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // In place of the base class's: these are what thread sanitizers and our own tests can see into.
  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override {}
  uint64_t getSequencenumber() const override { return sequence; }
  int sourceRank() const override;  // of what was received
  void abort() override;
  void complete(std::exception_ptr error);

  std::function<void()> operation;  // run once, then dropped with everything it holds
  uint64_t sequence = 0;
  int source = -1;

 private:
  void complete_future(const c10::intrusive_ptr<c10::ivalue::Future>& future, const std::exception_ptr& error) const;
  std::vector<at::Tensor> outputs_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when somebody asks
  bool future_due_ = false;
};

// Joins a thread of this library, through the call that set_blocking_call() gave; not from the thread itself.
void join_quietly(std::thread* thread);

class WorkQueue {
 public:
  WorkQueue();
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  void start(const c10::intrusive_ptr<CollectiveWork>& work);  // on the worker
  // Runs it here and throws its error, when the queue is idle; else as start().
  void start_here_if_idle(const c10::intrusive_ptr<CollectiveWork>& work);
  bool idle();                 // nothing runs or waits (the last work may be about to be seen complete)
  void wait_until_complete();  // every work that was started is seen complete
  // What has not begun ends with `error`; later operations too.
  void stop(std::exception_ptr error);
  void join();              // after stop(): the worker has ended
  void abandon() noexcept;  // in a forked child: lets go without touching locks that another thread may have held

 private:
  struct State {  // shared with the worker, which may outlive the queue by a moment
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<c10::intrusive_ptr<CollectiveWork>> waiting;
    bool running = false;
    int64_t incomplete = 0;  // started and not yet complete()
    std::exception_ptr stopped;
  };
  void enqueue(const c10::intrusive_ptr<CollectiveWork>& work);  // with the mutex held
  static void run_worker(State& state);
  static void run(State& state, CollectiveWork& work);
  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace trueshard::comm
