// SPDX-License-Identifier: BSD-3-Clause
// Role: ranks of a benchmark as forked processes of this program, and times that all ranks agree on.
// Invariants: I1 forks before libtorch starts threads. I2 a sample's time is that of the slowest rank.
// Threads: one. Errors: a rank that fails ends the program with a non-zero status.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <trueshard/process_group.h>

namespace trueshard::bench {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Store = c10::intrusive_ptr<c10d::Store>;

// Runs body(rank, world, store) in `world` processes; false when one failed.
inline bool run_ranks(int world, const std::function<void(int, int, const Store&)>& body) {
  std::string folder = (std::filesystem::temp_directory_path() / "trueshard-bench-XXXXXX").string();
  if (!::mkdtemp(folder.data())) return false;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        at::set_num_threads(1);
        body(rank, world, c10::make_intrusive<c10d::FileStore>(folder + "/store", world));
        std::fflush(stdout);
        ::_exit(0);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        ::_exit(1);
      }
    }
    children.push_back(child);
  }
  bool ok = true;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    ok &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return ok;
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one call: all ranks start together, `calls` calls, the slowest rank counts. The same number on every rank.
inline double slowest(const Group& group, int calls, const std::function<void()>& call) {
  group->barrier()->wait();
  const double start = now();
  for (int i = 0; i < calls; ++i) call();
  std::vector<at::Tensor> seconds{at::tensor({(now() - start) / calls})};
  c10d::AllreduceOptions maximum;
  maximum.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(seconds, maximum)->wait();
  return seconds[0].item<double>();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace trueshard::bench
