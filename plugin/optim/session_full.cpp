// SPDX-License-Identifier: BSD-3-Clause
// Whole fp32 parameters: FullParametersGuard and full_state_dict.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/parallel.h"
#include "plugin/optim/session.h"

namespace trueshard::optim {

void Session::agree_on_changes(const char* operation) {
  TORCH_CHECK(!reducer_->pass_open(), me(), " ", operation, ": a backward pass is running; enter between steps");
  engine::MessageHeader header;
  header.digest = changes_digest();
  const uint64_t seq = reducer_->meet(comm::Fingerprint::of(operation), header);
  reducer_->check_headers(seq, operation);
  reducer_->done(seq);
  reducer_->throw_if_tainted();
  adopt_changes();
  guard_digest_ = 0;
}

uint64_t Session::contents_digest() const {
  uint64_t digest = plan::digest(nullptr, 0);
  for (const auto& parameter : model_->parameters()) {
    const auto values = parameter.tensor.detach().as_strided({parameter.tensor.numel()}, {1});
    digest = plan::digest(values.const_data_ptr(), static_cast<int64_t>(values.nbytes()), digest);
  }
  return digest | 1;
}

void Session::enter_full() {
  if (full_depth_ > 0) {
    ++full_depth_;
    return;
  }
  agree_on_changes("enter full parameters");
  full_ = publisher_->gather_masters(true);
  for (int64_t p = 0; p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    if (parameter.master_in_compute() || parameter.numel == 0) continue;
    using Keep = at::Tensor;
    auto* keep = new Keep(full_[p]);
    model_->attach_to(p,
                      at::DataPtr(
                          full_[p].data_ptr(), keep, [](void* context) { delete static_cast<Keep*>(context); },
                          c10::Device(c10::kCPU)),
                      parameter.master_dtype);
  }
  full_.clear();
  entered_digest_ = contents_digest();
  ++full_depth_;
}

void Session::leave_full() {
  if (--full_depth_ > 0) return;
  const uint64_t digest = contents_digest();
  if (digest != entered_digest_) guard_digest_ = digest;
  for (int64_t p = 0; p < model_->size(); ++p) {
    auto& parameter = model_->parameters()[p];
    if (parameter.numel == 0) continue;
    const auto* shown = static_cast<const std::byte*>(parameter.tensor.const_data_ptr());
    const int64_t item = model_->master_itemsize(p);
    if (!parameter.master_in_compute()) {
      const auto range = model_->owned(p, model_->rank());
      if (!range.empty())
        std::memcpy(model_->master(p, model_->rank()), shown + range.begin * item,
                    static_cast<size_t>(range.size() * item));
      kernels::kernels().cast(shown, engine::kernel_dtype(parameter.master_dtype), model_->compute(p, model_->rank()),
                              engine::kernel_dtype(parameter.compute_dtype), parameter.numel);
      model_->attach(p);
    } else if (!model_->attached(p)) {  // replaced under the guard
      std::memcpy(model_->compute(p, model_->rank()), shown,
                  static_cast<size_t>(parameter.numel * model_->compute_itemsize(p)));
      model_->attach(p);
    }
    parameter.version = parameter.tensor._version();
  }
}

void Session::broadcast_full(int source) {
  TORCH_CHECK(source >= 0 && source < transport_->size(), me(), " FullParametersGuard::broadcast: source is ", source,
              "; expected a rank below ", transport_->size());
  const at::NoGradGuard no_grad;
  for (auto& parameter : model_->parameters()) {
    if (parameter.numel == 0) continue;
    std::vector<at::Tensor> one{parameter.tensor.detach().as_strided({parameter.numel}, {1})};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    group_->broadcast(one, options)->wait();
  }
}

std::vector<std::pair<std::string, at::Tensor>> Session::state_dict(bool wanted) {
  TORCH_CHECK(full_depth_ == 0, me(), " full_state_dict: a FullParametersGuard is alive; leave it first");
  agree_on_changes("full state dict");
  const auto masters = publisher_->gather_masters(wanted);
  std::vector<std::pair<std::string, at::Tensor>> entries;
  if (!wanted) return entries;
  for (int64_t p = 0; p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    entries.emplace_back(parameter.name, masters[p]);
    for (const auto& other : parameter.other_names) entries.emplace_back(other, masters[p]);
  }
  for (const auto& buffer : model_->buffers()) {
    auto copy = buffer.tensor.detach().clone();
    entries.emplace_back(buffer.name, copy);
    for (const auto& other : buffer.other_names) entries.emplace_back(other, copy);
  }
  return entries;
}

}  // namespace trueshard::optim
