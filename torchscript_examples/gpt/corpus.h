// SPDX-License-Identifier: BSD-3-Clause
// Role: the text of a folder of Python sources as bytes to learn from.
// Invariants: the text is a function of the files alone: sorted by their path below the folder, never by directory
// order.
//             Whole files are held back for validation. A window is a function of its key alone, whichever rank asks
//             for it.
// Shapes: windows: count * length byte values, one window after the other.
// Threads: immutable once read. Errors: std::runtime_error that names the folder or file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

struct Corpus {
  std::string train;
  std::string validation;
  int64_t files = 0;
};

// *.py below `folder`, without installed packages (site-packages, dist-packages) and test suites; at most `max_bytes`.
Corpus read_corpus(const std::string& folder, int64_t max_bytes);

// `count` windows of `length` bytes from `text`, at places drawn from `key`.
struct WindowRequest {
  int64_t count = 1;
  int64_t length = 1;
  uint64_t key = 0;
};
std::vector<int64_t> windows(const std::string& text, const WindowRequest& request);

// Mixes the parts of a key, so that neighbouring steps and leaves share no windows.
uint64_t mix(uint64_t seed, uint64_t step, uint64_t leaf);

}  // namespace gpt
