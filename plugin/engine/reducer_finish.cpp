// SPDX-License-Identifier: BSD-3-Clause
// The end of a tree: agreement, the last merge, what the user sees of it, and zeroing.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "plugin/comm/errors.h"
#include "plugin/engine/reducer.h"
#include "plugin/observe/trace.h"

namespace trueshard::engine {

void Reducer::break_off(const c10::DistBackendError& error) {
  throw_if_broken();
  broken_ = comm::text_of(error);
  if (!model_->transport()->failed()) {  // nobody died or was late: the ranks made different calls
    broken_ +=
        " (if the ranks ran different numbers of backward passes, let those with less data call empty_pass(); the "
        "weights are unchanged, but this optimizer can not go on: call shard() again)";
  }
  comm::throw_backend_error(broken_);
}

uint64_t Reducer::meet(const comm::Fingerprint& fingerprint, const MessageHeader& header) {
  throw_if_broken();
  model_->settle();
  try {
    const uint64_t seq = channel_->post(fingerprint, &header, sizeof header);
    channel_->wait_all_posted(seq);
    return seq;
  } catch (const c10::DistBackendError& error) {
    break_off(error);
  }
}

void Reducer::check_headers(uint64_t seq, const char* where) {
  const std::string head = me() + " " + where + ": ";
  MessageHeader first;
  std::memcpy(&first, channel_->record(0, seq), sizeof first);
  for (int r = 0; r < model_->world(); ++r) {
    MessageHeader header;
    std::memcpy(&header, channel_->record(r, seq), sizeof header);
    if (taint_.empty() && header.tainted) {
      taint_ = head + "rank " + std::to_string(r) + ": " + header.error +
               "; no weight has changed; call zero_grad() and run the step again";
    }
    if (first.scale < 0) first.scale = header.scale;  // no leaf on that rank: any scale will do
    if (taint_.empty() && header.scale >= 0 && header.scale != first.scale) {
      taint_ = head + "loss scales differ: rank 0 used " + std::to_string(first.scale) + ", rank " + std::to_string(r) +
               " used " + std::to_string(header.scale) +
               " (0: not scaled); scale every loss with the same ShardedGradScaler on all ranks";
    }
    if (taint_.empty() && header.zeroed != first.zeroed) {
      taint_ = head + "gradients were zeroed on some ranks only (rank 0 and rank " + std::to_string(r) +
               " differ); zero the same gradients on all ranks";
    }
    if (taint_.empty() && header.deferred != first.deferred) {
      taint_ = head + "ranks deferred different numbers of passes: rank 0 " + std::to_string(first.deferred) +
               ", rank " + std::to_string(r) + " " + std::to_string(header.deferred) +
               "; use NoSyncGuard around the same passes on all ranks";
    }
  }
}

std::string Reducer::differing_digests(uint64_t seq) const {
  MessageHeader first, header;
  std::memcpy(&first, channel_->record(0, seq), sizeof first);
  for (int r = 1; r < model_->world(); ++r) {
    std::memcpy(&header, channel_->record(r, seq), sizeof header);
    if (header.digest == first.digest) continue;
    return "parameters were changed outside the optimizer on some ranks only, or to different values (rank 0 and "
           "rank " +
           std::to_string(r) +
           " differ); make the same change on all ranks, or use FullParametersGuard and broadcast()";
  }
  return {};
}

void Reducer::tell_errors(MessageHeader& header) const {
  header.zeroed = plan::digest(zeroed_.data(), static_cast<int64_t>(zeroed_.size()));
  header.tainted = !local_error_.empty();
  std::strncpy(header.error, local_error_.c_str(), sizeof header.error - 1);
}

void Reducer::finish(uint64_t digest) {
  throw_if_broken();
  tracker_->close_abandoned();
  TORCH_CHECK(!pass_, me(),
              " finish_reduction: a backward pass is still running; call it after backward() has returned");
  notice_changes();
  for (int64_t p = 0; p < model_->size(); ++p) {  // parameters that became trainable after the forward have no hook yet
    const auto& tensor = model_->parameters()[p].tensor;
    if (!shards_[p].defined() || placeholder_set_[p] || !tensor.grad().defined() || is_frozen(p)) continue;
    begin_pass(/*deferred=*/false);
    pass_->overlapped = false;
    end_synchronised_pass();
    break;
  }
  if (finished_) return;
  refuse_foreign_gradients();
  RECORD_FUNCTION("trueshard::finish_reduction", std::vector<c10::IValue>());
  MessageHeader header;
  header.scale = tree_scale_ < 0 ? 0 : tree_scale_;
  header.deferred = deferred_passes_;
  header.digest = digest;
  tell_errors(header);
  auto fingerprint = comm::Fingerprint::of("finish reduction");
  fingerprint.pass = static_cast<uint32_t>(passes_);
  const uint64_t seq = meet(fingerprint, header);
  check_headers(seq, "finish_reduction");
  const auto differing = differing_digests(seq);
  if (taint_.empty() && !differing.empty()) taint_ = me() + " finish_reduction: " + differing;
  done(seq);
  TORCH_CHECK(taint_.empty(), taint_);
  TORCH_CHECK(deferred_passes_ == 0, me(), " finish_reduction: the last ", deferred_passes_,
              " backward passes ran under NoSyncGuard and were not synchronised; run the last pass of a step outside "
              "the guard (or zero_grad())");
  std::fill(zeroed_.begin(), zeroed_.end(), uint8_t{0});
  base_is_zero_ = false;
  const double divisor = model_->options().gradient_divide_factor().value_or(static_cast<double>(model_->world()));
  record_.nonfinite = false;
  for (auto& sums : sums_) sums.finish(divisor, record_);
  record_.valid = true;
  if (passes_ > 0) scale_ = header.scale;
  passes_ = 0;
  tree_scale_ = -1;
  if (model_->replicated() && model_->world() > 1) gather_gradients();
  show_gradients();
  finished_ = true;
}

void Reducer::show_gradients() {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined()) continue;
    has_gradient_[p] = sums_[model_->plan().bucket_of[p]].base(model_->plan().placement_of[p]);
    if (!has_gradient_[p]) continue;
    shards_[p].mutable_grad() = shown_[p] = gradients_[p];
    shard_gradient_set_[p] = true;
    gradient_versions_[p] = gradients_[p]._version();
  }
}

void Reducer::hide_gradients(const std::vector<at::Tensor>& stand_ins) {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (has_gradient_[p]) shards_[p].mutable_grad() = shown_[p] = stand_ins[p];
  }
}

void Reducer::done_and_wait(uint64_t seq) {
  channel_->done_reading(seq);
  try {
    channel_->wait_all_read(seq);
  } catch (const c10::DistBackendError& error) {
    break_off(error);
  }
}

bool Reducer::has_base() const {
  for (const auto& sums : sums_) {
    if (sums.any_base()) return true;
  }
  return false;
}

bool Reducer::agree_any(const char* operation, bool flag) {
  MessageHeader header;
  header.flag = flag;
  const uint64_t seq = meet(comm::Fingerprint::of(operation), header);
  bool any = false;
  for (int r = 0; r < model_->world(); ++r) {
    std::memcpy(&header, channel_->record(r, seq), sizeof header);
    any |= header.flag != 0;
  }
  done(seq);
  return any;
}

void Reducer::reshow_gradients() {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (has_gradient_[p] && shards_[p].grad().is_same(shown_[p])) shards_[p].mutable_grad() = shown_[p] = gradients_[p];
  }
}

bool Reducer::any_gradient() const {
  return std::find(has_gradient_.begin(), has_gradient_.end(), true) != has_gradient_.end();
}

bool Reducer::gradients_are_ours() const {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!has_gradient_[p]) continue;
    if (!shards_[p].grad().is_same(shown_[p]) || gradients_[p]._version() != gradient_versions_[p]) return false;
  }
  return true;
}

bool Reducer::record_is_current() const { return record_.valid && gradients_are_ours(); }

void Reducer::zero() {
  throw_if_broken();
  tracker_->close_abandoned();
  TORCH_CHECK(!pass_, me(), " zero_grad: a backward pass is still running; call it after backward() has returned");
  for (auto& sums : sums_) sums.clear();
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined()) continue;
    sums_[model_->plan().bucket_of[p]].set_base(model_->plan().placement_of[p], false);
    shards_[p].mutable_grad() = at::Tensor();
    model_->parameters()[p].tensor.mutable_grad() = at::Tensor();
    deferred_[p] = at::Tensor();
    placeholder_set_[p] = shard_gradient_set_[p] = has_gradient_[p] = false;
    observe::chaos_poison(model_->gradient(p), static_cast<size_t>(gradients_[p].nbytes()));  // stale sums show up
  }
  passes_ = 0;
  deferred_passes_ = 0;
  deferred_scale_ = tree_scale_ = -1;
  scale_ = 0;
  finished_ = false;
  base_is_zero_ = false;
  std::fill(zeroed_.begin(), zeroed_.end(), uint8_t{0});
  record_.valid = false;
  taint_.clear();
  local_error_.clear();
  install_hooks();
}

void Reducer::zero_in_place() {
  throw_if_broken();
  tracker_->close_abandoned();
  notice_changes();
  std::vector<bool> exists(static_cast<size_t>(model_->size()), false);
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined()) continue;
    const int64_t bucket = model_->plan().bucket_of[p], placement = model_->plan().placement_of[p];
    exists[p] = has_gradient_[p] || sums_[bucket].has_sum(placement);
  }
  zero();
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!exists[p]) continue;
    std::memset(model_->gradient(p), 0, static_cast<size_t>(gradients_[p].nbytes()));
    sums_[model_->plan().bucket_of[p]].set_base(model_->plan().placement_of[p], true);
    place_placeholder(p);
  }
  base_is_zero_ = true;
  show_gradients();
}

void Reducer::place_placeholder(int64_t parameter) {
  model_->parameters()[parameter].tensor.mutable_grad() = placeholders_[parameter];
  placeholder_set_[parameter] = true;
}

int64_t Reducer::deferred_bytes() const {
  int64_t bytes = 0;
  for (const auto& tensor : deferred_) bytes += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  return bytes;
}
int64_t Reducer::exchange_bytes() const {
  return std::accumulate(area_touched_.begin(), area_touched_.end(), int64_t{0});
}
int64_t Reducer::partial_bytes() const {
  int64_t bytes = 0;
  for (const auto& sums : sums_) bytes += sums.extra_bytes();
  return bytes;
}

}  // namespace trueshard::engine
