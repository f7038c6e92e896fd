// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/publisher.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <cstring>

#include "plugin/observe/trace.h"

namespace trueshard::engine {

// A backward through a graph from before the step is an error, as after libtorch's own in-place step.
void Publisher::bump_versions(Which which) {
  for (int64_t p = 0; p < model_->size(); ++p) {
    auto& parameter = model_->parameters()[p];
    if (!model_->manages(p) || (which == Which::kStepped && !reducer_.has_gradient(p))) continue;
    parameter.tensor.unsafeGetTensorImpl()->bump_version();
    parameter.version = parameter.tensor._version();
  }
}

void Publisher::publish(Which which) {
  bump_versions(which);
  if (!model_->keeps_compute_copies()) return model_->masters_changed();
  if (model_->replicated() || model_->world() == 1) return;
  RECORD_FUNCTION("trueshard::publish_parameters", std::vector<c10::IValue>());
  const int64_t start = observe::now_ns();
  const uint64_t seq = reducer_.meet(comm::Fingerprint::of("publish parameters"));
  if (model_->shares()) {  // what was stepped lies where all ranks see it
    reducer_.done(seq);
    model_->show_common();
    seconds_ += static_cast<double>(observe::now_ns() - start) * 1e-9;
    return;
  }
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (which == Which::kStepped && !reducer_.has_gradient(p)) continue;
    const int64_t item = model_->compute_itemsize(p);
    for (int k = 1; k < model_->world(); ++k) {
      const int r = (model_->rank() + k) % model_->world();
      const auto piece = model_->piece(p, r);
      if (piece.empty()) continue;
      std::memcpy(model_->compute(p, model_->rank()) + piece.begin * item, model_->compute(p, r) + piece.begin * item,
                  static_cast<size_t>(piece.size() * item));
      bytes_gathered_ += piece.size() * item;
    }
  }
  reducer_.done_and_wait(seq);
  seconds_ += static_cast<double>(observe::now_ns() - start) * 1e-9;
}

std::vector<at::Tensor> Publisher::gather_masters(bool wanted) {
  const uint64_t seq = reducer_.meet(comm::Fingerprint::of("gather masters"));
  std::vector<at::Tensor> masters;
  for (int64_t p = 0; wanted && p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    const auto dtype = parameter.stored_dtype();
    auto whole = at::empty_strided(parameter.sizes, parameter.strides, at::TensorOptions().dtype(dtype));
    auto* data = static_cast<std::byte*>(whole.data_ptr());
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    const int sources = model_->replicated() ? 1 : model_->world();
    for (int k = 0; k < sources; ++k) {
      const int r = model_->replicated() ? model_->rank() : k;
      const auto range = model_->owned(p, r);
      if (!range.empty())
        std::memcpy(data + range.begin * item, model_->master(p, r), static_cast<size_t>(range.size() * item));
    }
    masters.push_back(std::move(whole));
  }
  reducer_.done_and_wait(seq);
  return masters;
}

}  // namespace trueshard::engine
