// SPDX-License-Identifier: BSD-3-Clause
// Role: what one rank saw, as a JSON file for proof.py.
// Invariants: numbers are written so that reading them gives the same bits.
// Threads: one. Errors: std::runtime_error when the file cannot be written.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gpt {

struct StepRecord {
  int64_t step = 0;
  double loss = 0;  // mean over the step's leaves, in the order of the leaves
  double norm = 0;
  double scale = 1;
  double lr = 0;
  double seconds = 0;
  double communicating = 0;  // seconds of those
};

struct MemoryRecord {
  int64_t ledger = 0;          // what the library says it holds between steps
  int64_t formula = 0;         // bytes by formula for the module's elements
  int64_t formula_padded = 0;  // the same, every parameter and shard rounded up
  int64_t process = 0;         // growth of the process's own and shared memory (PSS without files)
};

struct Journal {
  int rank = 0, world = 1, threads = 1;
  int64_t passes = 1, parameters = 0, corpus_bytes = 0, corpus_files = 0, tokens_per_step = 0, skipped = 0;
  std::string stage, dtype, overlap, digest;
  int64_t bucket_bytes = 0;
  std::vector<StepRecord> steps;
  std::vector<std::pair<int64_t, double>> validation;  // step, loss
  MemoryRecord memory;
};

void write_journal(const Journal& journal, const std::string& path);

// This process's share of anonymous and shared memory, in bytes; memory that the heap no longer uses is given back
// first.
int64_t resident_bytes();

}  // namespace gpt
