// SPDX-License-Identifier: BSD-3-Clause
#include "torchscript_examples/gpt/corpus.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 6> kSkippedFolders = {"site-packages", "dist-packages", "__pycache__",
                                                             "test",          "tests",         "idle_test"};
constexpr uint64_t kHeldBack = 20;  // one file in this many is for validation

uint64_t next(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

uint64_t hash_of(std::string_view text) {  // FNV-1a
  uint64_t hash = 1469598103934665603ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

std::vector<std::string> sources_below(const std::string& folder) {
  std::vector<std::string> paths;
  const auto options = fs::directory_options::skip_permission_denied;
  for (auto it = fs::recursive_directory_iterator(folder, options); it != fs::recursive_directory_iterator(); ++it) {
    const auto name = it->path().filename().string();
    if (it->is_directory()) {
      if (std::find(kSkippedFolders.begin(), kSkippedFolders.end(), name) != kSkippedFolders.end()) {
        it.disable_recursion_pending();
      }
    } else if (it->is_regular_file() && it->path().extension() == ".py") {
      paths.push_back(it->path().lexically_relative(folder).generic_string());
    }
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("gpt: cannot read '" + path.string() + "'");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

Corpus read_corpus(const std::string& folder, int64_t max_bytes) {
  if (!fs::is_directory(folder)) {
    throw std::runtime_error("gpt: --corpus '" + folder +
                             "' is no folder; give the folder of Python's standard library");
  }
  Corpus corpus;
  for (const auto& path : sources_below(folder)) {
    const auto text = text_of(fs::path(folder) / path);
    const auto total = corpus.train.size() + corpus.validation.size() + text.size();
    if (static_cast<int64_t>(total) > max_bytes) break;
    (hash_of(path) % kHeldBack == 0 ? corpus.validation : corpus.train) += text;
    ++corpus.files;
  }
  return corpus;
}

std::vector<int64_t> windows(const std::string& text, const WindowRequest& request) {
  const auto size = static_cast<int64_t>(text.size());
  if (size <= request.length) {
    throw std::runtime_error("gpt: the corpus has " + std::to_string(size) + " bytes, a window needs more than " +
                             std::to_string(request.length) + "; give a larger folder with --corpus");
  }
  std::vector<int64_t> values;
  values.reserve(static_cast<size_t>(request.count * request.length));
  uint64_t state = request.key;
  for (int64_t i = 0; i < request.count; ++i) {
    const auto begin = static_cast<size_t>(next(state) % static_cast<uint64_t>(size - request.length));
    for (size_t k = begin; k < begin + static_cast<size_t>(request.length); ++k) {
      values.push_back(static_cast<unsigned char>(text[k]));
    }
  }
  return values;
}

uint64_t mix(uint64_t seed, uint64_t step, uint64_t leaf) {
  uint64_t state = seed;
  state = next(state) ^ step;
  state = next(state) ^ leaf;
  return next(state);
}

}  // namespace gpt
