// SPDX-License-Identifier: BSD-3-Clause
// Role: the command line of gpt_train, without a library for it.
// Invariants: an option is known, has a value and the value is whole, or parsing throws; nothing is ignored.
// Threads: none. Errors: std::invalid_argument with the option, what was given and what is possible.
#pragma once
#include <cstdint>
#include <string>

namespace gpt {

enum class Switch { kOff, kOn };

struct Arguments {
  std::string stage = "zero2";  // replicated, zero1, zero2, zero3
  std::string dtype = "bf16";   // bf16, fp32
  Switch overlap = Switch::kOn;
  int64_t bucket_bytes = 1 << 20;
  int64_t passes = 1;  // backward passes per step, each a leaf of every rank
  int64_t steps = 20;
  int64_t batch = 16;  // windows per leaf
  int64_t context = 128;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t layers = 4;
  Switch tied = Switch::kOff;
  double lr = 2e-3;
  int64_t warmup = 20;
  double max_norm = 1.0;
  double init_scale = 65536.0;
  int64_t growth_interval = 50;
  int64_t report_every = 10;
  int64_t validate_every = 0;  // 0: never
  int64_t sample = 0;          // bytes of text that rank 0 writes at the end
  uint64_t seed = 1;
  std::string script;  // TorchScript file to train in place of the torch::nn model
  std::string corpus;
  int64_t corpus_bytes = 16 << 20;
  std::string log;  // JSON; every rank appends its rank to the name
};

Arguments parse_arguments(int argc, const char* const* argv);
std::string usage();

}  // namespace gpt
