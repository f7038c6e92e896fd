// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/background.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

namespace trueshard::checkpoint {

namespace {

// The last save of each group of this process. Destroyed at the program's end, which waits for what is under way.
struct Register {
  std::mutex mutex;
  std::vector<std::shared_ptr<BackgroundSave>> saves;
  ~Register() {
    for (const auto& save : saves) save->wait_at_exit();
  }
};
Register& all_saves() {
  static Register saves;
  return saves;
}

}  // namespace

BackgroundSave::BackgroundSave(std::unique_ptr<SaveJob> job, const std::shared_ptr<comm::Transport>& transport)
    : job_(std::move(job)), transport_(transport), alone_(!transport), process_(::getpid()) {}

void BackgroundSave::run(const std::shared_ptr<BackgroundSave>& save) {
  std::thread([save] {
    std::exception_ptr error;
    try {
      save->job_->write();
    } catch (...) {
      error = std::current_exception();
    }
    save->job_.reset();  // the snapshot's memory
    const std::lock_guard<std::mutex> lock(save->mutex_);
    save->error_ = error;
    save->done_ = true;
    save->finished_.notify_all();
  }).detach();
}

bool BackgroundSave::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void BackgroundSave::wait_until_done(std::unique_lock<std::mutex>& lock) {
  finished_.wait(lock, [this] { return done_; });
}

void BackgroundSave::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until_done(lock);
  seen_ = true;
  if (error_) std::rethrow_exception(error_);
}

void BackgroundSave::wait_for_error() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until_done(lock);
    if (seen_) return;
  }
  wait();
}

void BackgroundSave::wait_at_exit() noexcept {
  if (process_ != ::getpid()) return;  // its thread lives in the parent
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until_done(lock);
}

bool BackgroundSave::belongs_to(const std::shared_ptr<comm::Transport>& transport) const {
  return transport ? !alone_ && transport_.lock() == transport : alone_;
}

std::shared_ptr<BackgroundSave> start_background_save(const SaveRequest& request) {
  auto job = std::make_unique<SaveJob>(request);
  job->take_snapshot();
  auto save = std::make_shared<BackgroundSave>(std::move(job), request.transport);
  auto& all = all_saves();
  BackgroundSave::run(save);
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.saves, [&](const auto& each) { return each->belongs_to(request.transport); });
  all.saves.push_back(save);
  return save;
}

void finish_background_save(const std::shared_ptr<comm::Transport>& transport) {
  std::shared_ptr<BackgroundSave> found;
  {
    auto& all = all_saves();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& each : all.saves) {
      if (each->belongs_to(transport)) found = each;
    }
  }
  if (found) found->wait_for_error();
}

}  // namespace trueshard::checkpoint
