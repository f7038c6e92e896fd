// SPDX-License-Identifier: BSD-3-Clause
// Role: what trueshard-checkpoint does, one function per subcommand.
// Threads: one. Errors: FormatError, which main() prints. Each returns the exit status: 0, or for verify and diff 1
// when something is wrong or different.
#pragma once
#include <cstdint>
#include <string>

namespace trueshard::checkpoint::tool {

struct Output {
  bool json = false;      // one JSON object on stdout
  bool progress = false;  // on stderr
};

int inspect(const std::string& path, bool all_tensors, const Output& output);
int verify(const std::string& path, const Output& output);

struct ExportRequest {
  std::string path, folder;
  std::string dtype = "fp32";
  std::string entry;  // empty: the only one with weights
  int64_t most_file_bytes = 5'000'000'000;
  bool force = false;  // write over files that are there
};
int export_weights(const ExportRequest& request, const Output& output);

struct DiffRequest {
  std::string a, b;
  int64_t most_shown = 10;
};
int diff(const DiffRequest& request, const Output& output);

// "12.3 MB"
std::string describe_bytes(int64_t bytes);

// A line on stderr that says how far a long work is; nothing when it is not wanted.
class Progress {
 public:
  Progress(const char* what, int64_t total_bytes, bool shown);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void advance(int64_t bytes);

 private:
  const char* what_;
  int64_t total_, done_ = 0, percent_ = -1;
  bool shown_;
};

}  // namespace trueshard::checkpoint::tool
