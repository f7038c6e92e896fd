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

std::string Session::exchange_changes(const char* operation) {
  TORCH_CHECK(!reducer_->pass_open(), me(), " ", operation, ": a backward pass is running; enter between steps");
  engine::MessageHeader header;
  header.digest = changes_digest();
  reducer_->tell_errors(header);
  const uint64_t seq = reducer_->meet(comm::Fingerprint::of(operation), header);
  reducer_->check_headers(seq, operation);
  auto differing = reducer_->differing_digests(seq);
  reducer_->done(seq);
  reducer_->throw_if_tainted();
  return differing;
}

void Session::agree_on_changes(const char* operation) {
  const auto differing = exchange_changes(operation);
  TORCH_CHECK(differing.empty(), me(), " ", operation, ": ", differing);
  adopt_changes();
  guard_digest_ = 0;
}

uint64_t Session::contents_digest() const {
  uint64_t digest = plan::digest(nullptr, 0);
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shows_masters(p) || !model_->manages(p)) continue;
    const auto values = model_->shown(p);
    digest = plan::digest(values.data(), static_cast<int64_t>(values.tensor.nbytes()), digest);
  }
  return digest | 1;
}

bool Session::shows_masters(int64_t p) const {
  const auto& parameter = model_->parameters()[p];
  return parameter.tensor.sizes() == parameter.sizes &&
         parameter.tensor.scalar_type() ==
             (parameter.separate_master ? parameter.stored_dtype() : parameter.compute_dtype);
}

// What this rank has of a parameter: its compute copy, and of it as a master what it owns.
void Session::write_own_values(int64_t p, const at::Tensor& whole) const {
  const auto& parameter = model_->parameters()[p];
  const auto dtype = engine::kernel_dtype(whole.scalar_type());
  auto* data = static_cast<std::byte*>(whole.data_ptr());
  kernels::kernels().cast(model_->visible(p), engine::kernel_dtype(parameter.compute_dtype), data, dtype,
                          parameter.numel);
  const auto range = model_->owned(p, model_->rank());
  if (range.empty() || !parameter.separate_master) return;
  const auto item = kernels::itemsize(dtype);
  std::memcpy(data + range.begin * item, model_->master(p, model_->rank()), static_cast<size_t>(range.size() * item));
}

// Ranks whose parameters differ may enter: a guard is where that is put right. Each then sees its own values, as far as
// it has them (its own part of the masters, its compute copy of the rest), so that broadcast() spreads one rank's.
void Session::enter_full() {
  if (full_depth_ > 0) {
    ++full_depth_;
    return;
  }
  diverged_ = !exchange_changes("enter full parameters").empty();
  if (diverged_ && (!model_->keeps_compute_copies() || model_->shares())) {
    // What others have written must not show here: the masters are read before they take it over.
    full_ = publisher_->gather_masters(true);
    for (int64_t p = 0; p < model_->size(); ++p) {
      if (model_->parameters()[p].ahead) write_own_values(p, full_[p]);
    }
    for (const auto& change : changes_)
      full_[change.parameter].copy_(change.copy.defined() ? change.copy : model_->shown(change.parameter).tensor);
    adopt_changes();
  } else {
    adopt_changes();
    full_ = publisher_->gather_masters(true);
  }
  if (!diverged_) guard_digest_ = 0;
  for (int64_t p = 0; p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    if (parameter.numel == 0 || !model_->manages(p)) continue;
    if (!parameter.separate_master && !(diverged_ && model_->shares())) continue;
    if (diverged_ && model_->keeps_compute_copies() && !model_->shares()) write_own_values(p, full_[p]);
    using Keep = at::Tensor;
    auto* keep = new Keep(full_[p]);
    model_->attach_to(p,
                      at::DataPtr(
                          full_[p].data_ptr(), keep, [](void* context) { delete static_cast<Keep*>(context); },
                          c10::Device(c10::kCPU)),
                      parameter.stored_dtype());
  }
  full_.clear();
  entered_digest_ = contents_digest();
  ++full_depth_;
}

void Session::leave_full() {
  if (--full_depth_ > 0) return;
  const uint64_t digest = contents_digest();
  const bool same = digest == entered_digest_ && !diverged_;
  if (!same) guard_digest_ = digest;
  // A parameter that was cast or reshaped under the guard keeps its master; changes_digest() says so to all ranks. What
  // lies in another parameter's memory (set_data) is copied before that memory goes.
  std::vector<at::Tensor> copies(static_cast<size_t>(model_->size()));
  const auto written = [&](int64_t p) {
    return model_->parameters()[p].numel > 0 && model_->manages(p) && shows_masters(p);
  };
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (written(p) && model_->shows_foreign_memory(p)) {
      const auto& parameter = model_->parameters()[p];
      copies[p] = at::empty_strided(parameter.sizes, parameter.strides, parameter.tensor.options());
      copies[p].copy_(parameter.tensor.detach());
    }
  }
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!copies[p].defined() && !written(p)) continue;
    if (same && model_->shares() && !model_->shows_foreign_memory(p)) {  // nothing that views must be ahead with
      model_->show_again(p);
      continue;
    }
    const auto values = copies[p].defined() ? copies[p] : model_->shown(p).tensor;
    model_->adopt_whole(p, static_cast<const std::byte*>(values.const_data_ptr()));
  }
  model_->masters_changed();
}

void Session::broadcast_full(int source) {
  TORCH_CHECK(source >= 0 && source < transport_->size(), me(), " FullParametersGuard::broadcast: source is ", source,
              "; expected a rank below ", transport_->size());
  const at::NoGradGuard no_grad;
  for (int64_t p = 0; p < model_->size(); ++p) {
    auto& parameter = model_->parameters()[p];
    if (parameter.numel == 0) continue;
    const auto shown = model_->shown(p);
    const auto& whole = shown.tensor;
    std::vector<at::Tensor> one{whole.as_strided({parameter.numel}, {1})};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    group_->broadcast(one, options)->wait();
    if (!whole.is_alias_of(parameter.tensor)) parameter.tensor.detach().copy_(whole);
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
    // What another optimizer manages: its value as the module shows it.
    const auto value = model_->manages(p) ? masters[p] : parameter.tensor.detach().to(parameter.master_dtype).clone();
    entries.emplace_back(parameter.name, value);
    for (const auto& other : parameter.other_names) entries.emplace_back(other, value);
  }
  for (const auto& buffer : model_->buffers()) {
    auto copy = buffer.tensor.detach().clone();
    entries.emplace_back(buffer.name, copy);
    for (const auto& other : buffer.other_names) entries.emplace_back(other, copy);
  }
  return entries;
}

}  // namespace trueshard::optim
