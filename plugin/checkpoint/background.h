// SPDX-License-Identifier: BSD-3-Clause
// Role: saves whose writing goes on while the program trains: one at a time per group, each on a thread of its own.
// Invariants: I1 a save that is under way is finished before another save or a load of its group begins. I2 an error
// that nobody has seen is thrown by the next call. I3 at the program's end what is under way is finished first.
// Threads: one caller at a time per group. Errors: those of the save, alike on all ranks.
#pragma once
#include <sys/types.h>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "plugin/checkpoint/save.h"

namespace trueshard::checkpoint {

class BackgroundSave {
 public:
  BackgroundSave(std::unique_ptr<SaveJob> job, const std::shared_ptr<comm::Transport>& transport);
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  bool done() const;
  void wait();                   // throws the save's error, each time
  void wait_for_error();         // throws it unless wait() did already
  void wait_at_exit() noexcept;  // does not wait in a process that was forked off since
  bool belongs_to(const std::shared_ptr<comm::Transport>& transport) const;
  static void run(const std::shared_ptr<BackgroundSave>& save);  // on a thread that nobody joins

 private:
  void wait_until_done(std::unique_lock<std::mutex>& lock);
  std::unique_ptr<SaveJob> job_;
  std::weak_ptr<comm::Transport> transport_;
  bool alone_;
  pid_t process_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false, seen_ = false;
  std::exception_ptr error_;
};

// Takes the snapshot (the program may then change everything) and starts the writing.
std::shared_ptr<BackgroundSave> start_background_save(const SaveRequest& request);
// Waits for what is under way in the group and throws its error if nobody has seen it.
void finish_background_save(const std::shared_ptr<comm::Transport>& transport);

}  // namespace trueshard::checkpoint
