// SPDX-License-Identifier: BSD-3-Clause
// Role: hooks on the parameters' gradient accumulators, and the placeholder that stands in .grad once a gradient was
// reduced away. Invariants: I1 hooks are installed once per accumulator and do nothing after the sink is gone. I2 the
// placeholder is cleared
//             before the next accumulation; reading it throws its text.
// Threads: hooks run on the thread of the backward. Errors: what the sink throws comes out of backward().
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trueshard::engine {

class GradientSink {
 public:
  virtual ~GradientSink() = default;
  virtual void before_accumulate(int64_t parameter) = 0;  // .grad is about to be written
  virtual void after_accumulate(int64_t parameter) = 0;   // .grad holds this contribution
};

class GradientHooks {
 public:
  explicit GradientHooks(GradientSink* sink) : target_(std::make_shared<Target>(Target{sink})) {}
  ~GradientHooks() { target_->sink = nullptr; }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  // Installs the hooks if the tensor requires a gradient and has none of ours on its present accumulator.
  void install(int64_t parameter, const at::Tensor& tensor);

 private:
  struct Target {
    GradientSink* sink;
  };
  struct PreHook;
  struct PostHook;
  struct Installed;
  std::shared_ptr<Target> target_;
  std::vector<std::shared_ptr<Installed>> installed_;  // by parameter; keeps the accumulator alive
};

// A tensor of the parameter's shape and dtype without memory: every access to its data throws `text`.
at::Tensor make_placeholder(const at::Tensor& like, const std::string& text);

}  // namespace trueshard::engine
