// SPDX-License-Identifier: BSD-3-Clause
// Role: starts the ranks of a test, as threads of the test program or as forked processes, and collects what became of
// them. Invariants: I1 every rank that was started has ended when a run returns. I2 nothing is left in the temporary
// folder. I3 processes are forked from a program without other threads: run them before or after rank threads, never
// during. Threads: one run at a time. Errors: a rank's exception is its result, not the caller's; use
// ASSERT_TRUE(results.ok()) << results.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <trueshard/process_group.h>

namespace trueshard::testing {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
constexpr int kMarks = 64;

struct Rank {  // what a rank's function is given
  int rank = 0;
  int world = 1;
  c10::intrusive_ptr<c10d::Store> store;
  std::atomic<int>* marks = nullptr;  // kMarks numbers, zero at first, shared by all ranks and the test itself
  Group group(std::chrono::milliseconds timeout = std::chrono::seconds(60), const std::string& name = "") const {
    return init_process_group(store, rank, world, ProcessGroupOptions().timeout(timeout).group_name(name));
  }
};

struct RankResult {
  std::string error;   // text of the exception, without source locations; empty: none
  std::string report;  // what the function returned
  int signal = 0;      // that ended the process
  bool ok() const { return error.empty() && signal == 0; }
};

struct RankResults : std::vector<RankResult> {
  bool ok() const {
    for (const RankResult& result : *this) {
      if (!result.ok()) return false;
    }
    return true;
  }
  friend std::ostream& operator<<(std::ostream& out, const RankResults& results) {
    for (size_t r = 0; r < results.size(); ++r) {
      out << "\n  rank " << r << ": ";
      if (results[r].signal != 0) out << "ended by signal " << results[r].signal << " ";
      out << (results[r].error.empty() ? "no error" : results[r].error);
    }
    return out;
  }
};

namespace detail {

inline std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}

// Calls a function of (Rank&), which may return a report or nothing.
template <class Function>
RankResult call(const Function& function, Rank& rank) {
  RankResult result;
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<const Function&, Rank&>>) {
      function(rank);
    } else {
      result.report = function(rank);
    }
  } catch (const std::exception& error) {
    result.error = text_of(error);
    if (result.error.empty()) result.error = "an exception without a text";
  }
  return result;
}

inline std::atomic<int>* make_marks() {
  void* memory =
      ::mmap(nullptr, kMarks * sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for the marks");
  return static_cast<std::atomic<int>*>(memory);
}
inline void free_marks(std::atomic<int>* marks) {
  ::munmap(static_cast<void*>(marks), kMarks * sizeof(std::atomic<int>));
}

}  // namespace detail

// Rank threads with a store in memory; `function(Rank&)`.
template <class Function>
RankResults run_thread_ranks(int world, const Function& function) {
  RankResults results;
  results.resize(static_cast<size_t>(world));
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int>* marks = detail::make_marks();
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      Rank rank{r, world, store, marks};
      results[static_cast<size_t>(r)] = detail::call(function, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  detail::free_marks(marks);
  return results;
}

// Rank threads with a group of them all; `function(int rank, const Group&)`.
template <class Function>
RankResults run_threads(int world, const Function& function) {
  return run_thread_ranks(world, [&](Rank& rank) {
    const Group group = rank.group();
    return function(rank.rank, group);
  });
}

// Ranks as processes, with a file store. The destructor kills what still runs.
class RankProcesses {
 public:
  template <class Function>
  RankProcesses(int world, const Function& function) : marks_(detail::make_marks()) {
    std::string pattern = (std::filesystem::temp_directory_path() / "trueshard-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = pattern;
    for (int r = 0; r < world; ++r) {
      int ends[2];
      if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
      const pid_t child = ::fork();
      if (child < 0) throw std::runtime_error("fork failed");
      if (child == 0) {
        ::close(ends[0]);
        run_child(r, world, ends[1], function);
      }
      ::close(ends[1]);
      children_.push_back({child, ends[0]});
    }
  }
  ~RankProcesses() {
    for (const Child& child : children_) {
      if (child.pid > 0) ::kill(child.pid, SIGKILL);
    }
    wait();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
    detail::free_marks(marks_);
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  std::atomic<int>& mark(int index) { return marks_[index]; }
  // Waits until the mark has at least this value; false after a minute.
  bool wait_mark(int index, int value) {
    for (int i = 0; i < 60000 && marks_[index].load() < value; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return marks_[index].load() >= value;
  }
  pid_t pid(int rank) const { return children_[static_cast<size_t>(rank)].pid; }
  void kill(int rank) { ::kill(pid(rank), SIGKILL); }
  void stop(int rank) { ::kill(pid(rank), SIGSTOP); }
  void resume(int rank) { ::kill(pid(rank), SIGCONT); }

  // Waits for one rank to end.
  RankResult wait(int rank) {
    Child& child = children_[static_cast<size_t>(rank)];
    if (child.pid > 0) {
      std::string text;  // first byte: 'o' report, 'e' error
      char buffer[4096];
      for (ssize_t n; (n = ::read(child.pipe, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(n));
      ::close(child.pipe);
      int status = 0;
      ::waitpid(child.pid, &status, 0);
      child.pid = -1;
      if (WIFSIGNALED(status)) child.result.signal = WTERMSIG(status);
      if (!text.empty() && text[0] == 'o') child.result.report = text.substr(1);
      if (!text.empty() && text[0] == 'e') child.result.error = text.substr(1);
      if (child.result.ok() && WIFEXITED(status) && WEXITSTATUS(status) != 0)
        child.result.error = "an assertion failed in the rank";
    }
    return child.result;
  }
  RankResults wait() {
    RankResults results;
    for (size_t r = 0; r < children_.size(); ++r) results.push_back(wait(static_cast<int>(r)));
    return results;
  }

 private:
  struct Child {
    pid_t pid;
    int pipe;
    RankResult result{};
  };

  template <class Function>
  [[noreturn]] void run_child(int r, int world, int pipe, const Function& function) {
    bool failed = false;
    {
      Rank rank{r, world, c10::make_intrusive<c10d::FileStore>(folder_ + "/store", world), marks_};
      const RankResult result = detail::call(function, rank);
      const std::string text = result.error.empty() ? "o" + result.report : "e" + result.error;
      for (size_t at = 0; at < text.size();) {
        const ssize_t n = ::write(pipe, text.data() + at, text.size() - at);
        if (n <= 0) break;
        at += static_cast<size_t>(n);
      }
      failed = !result.error.empty() || ::testing::Test::HasFailure();
    }
    ::_exit(failed ? 1 : 0);
  }

  std::atomic<int>* marks_;
  std::string folder_;
  std::vector<Child> children_;
};

template <class Function>
RankResults run_process_ranks(int world, const Function& function) {
  RankProcesses processes(world, function);
  return processes.wait();
}

// Ranks as processes with a group of them all; `function(int rank, const Group&)`.
template <class Function>
RankResults run_processes(int world, const Function& function) {
  return run_process_ranks(world, [&](Rank& rank) {
    const Group group = rank.group();
    return function(rank.rank, group);
  });
}

}  // namespace trueshard::testing
