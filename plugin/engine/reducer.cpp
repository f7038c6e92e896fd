// SPDX-License-Identifier: BSD-3-Clause
// Hooks and passes; one bucket's exchange is in reducer_exchange.cpp, the end of the tree in reducer_finish.cpp.
#include "plugin/engine/reducer.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "plugin/comm/errors.h"
#include "plugin/engine/dtypes.h"
#include "plugin/engine/pass_scale.h"
#include "plugin/observe/trace.h"

namespace trueshard::engine {

namespace {

std::string placeholder_text(const Parameter& p) {
  return "trueshard: the gradient of '" + p.name +
         "' was reduced away: this rank's part is in the sharded optimizer's param_groups() after finish_reduction(). "
         "Use trueshard::clip_grad_norm_, ShardedGradScaler and ShardedOptimizer::zero_grad() instead of local ones";
}
std::string shard_placeholder_text(const Parameter& p) {
  return "trueshard: the gradient of the shard of '" + p.name +
         "' is still being reduced: call ShardedOptimizer::finish_reduction() before reading it, and zero through "
         "ShardedOptimizer::zero_grad()";
}

}  // namespace

Reducer::Reducer(std::shared_ptr<ShardedModel> model, std::vector<at::Tensor> shards)
    : model_(std::move(model)), shards_(std::move(shards)), tracker_(BackwardTracker::of(model_->transport())) {
  const auto count = static_cast<size_t>(model_->size());
  gradients_.resize(count);
  placeholders_.resize(count);
  shard_placeholders_.resize(count);
  shown_.resize(count);
  deferred_.resize(count);
  has_gradient_.assign(count, false);
  placeholder_set_.assign(count, false);
  shard_gradient_set_.assign(count, false);
  gradient_versions_.assign(count, 0);
  expected_.assign(count, 1);
  zeroed_.assign(count, 0);
  size_t record_bytes = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(model_->plan().buckets.size()); ++b) {
    sums_.emplace_back(*model_, b);
    record_bytes = std::max(record_bytes, model_->plan().buckets[b].placements.size());
  }
  record_.block_squares.resize(model_->norm_plan().runs(model_->rank()).size());
  record_.cut_elements.resize(model_->norm_plan().cuts(model_->rank()).size());
  for (int64_t p = 0; p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    if (!shards_[p].defined()) continue;
    gradients_[p] =
        model_->flat_tensor_over(model_->gradient(p), model_->owned(p, model_->rank()).size(), parameter.master_dtype);
    placeholders_[p] = make_placeholder(parameter.tensor, placeholder_text(parameter));
    shard_placeholders_[p] = make_placeholder(gradients_[p], shard_placeholder_text(parameter));
  }
  lay_out_areas();
  channel_ = std::make_unique<comm::Channel>(
      model_->transport(), model_->name(),
      comm::ChannelOptions{sizeof(MessageHeader) + record_bytes, static_cast<int>(area_count_) + 4});
  hooks_ = std::make_unique<GradientHooks>(this);
  tracker_->add(this);
  install_hooks();
}

Reducer::~Reducer() {
  tracker_->remove(this);
  for (int64_t p = 0; p < model_->size(); ++p) {  // plain libtorch can go on with the module
    if (placeholder_set_[p] && model_->parameters()[p].tensor.grad().is_same(placeholders_[p])) {
      model_->parameters()[p].tensor.mutable_grad() = at::Tensor();
    }
  }
}

std::string Reducer::me() const {
  return "trueshard[rank " + std::to_string(model_->rank()) + "/" + std::to_string(model_->world()) + "]";
}

void Reducer::install_hooks() {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (shards_[p].defined()) hooks_->install(p, model_->parameters()[p].tensor);
  }
}

bool Reducer::is_frozen(int64_t parameter) const {
  return !shards_[parameter].defined() || !model_->parameters()[parameter].tensor.requires_grad();
}

void Reducer::throw_if_broken() const {
  if (!broken_.empty()) comm::throw_backend_error(broken_);
}

void Reducer::note_error(const std::string& text) {
  if (local_error_.empty()) local_error_ = text;
}

// ---- hooks ---------------------------------------------------------------------------------------------------------

void Reducer::before_accumulate(int64_t parameter) {
  model_->transport()->check_process("backward");
  throw_if_broken();
  if (tracker_->enter(this)) begin_pass(no_sync_ > 0);
  if (placeholder_set_[parameter]) {
    placeholder_set_[parameter] = false;
    model_->parameters()[parameter].tensor.mutable_grad() = at::Tensor();
  }
}

void Reducer::after_accumulate(int64_t parameter) {
  if (!pass_) return;  // a hook of an accumulator that was not ours when the backward began
  auto& pass = *pass_;
  const int count = ++pass.contributions[parameter];
  if (pass.deferred || !pass.overlapped) return;
  const int64_t bucket = model_->plan().bucket_of[parameter];
  if (bucket < pass.next_post) {
    note_error("a gradient of '" + model_->parameters()[parameter].name +
               "' came after its bucket had left (contribution " + std::to_string(count) + " of this pass, " +
               std::to_string(expected_[parameter]) +
               " were expected from earlier passes); use ShardOptions().overlap(false) for modules whose use changes "
               "from pass to pass");
    return;
  }
  if (count != expected_[parameter]) {
    if (count > expected_[parameter] && (pass.leaf[parameter] & kCopied))
      copy_leaf(bucket, model_->plan().placement_of[parameter]);
    return;
  }
  --pass.missing[bucket];
  // The leaf goes to the exchange area at once, while it is warm, if its bucket has one already.
  if (area_is_free(bucket, /*wait=*/false)) copy_leaf(bucket, model_->plan().placement_of[parameter]);
  advance(/*may_wait=*/tracker_->members() == 1);
}

// ---- passes --------------------------------------------------------------------------------------------------------

void Reducer::notice_changes() {
  install_hooks();
  bool any_left = false, any_zeroed = false;
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined()) continue;
    if (!detect_zeroed(p)) {
      any_left |= placeholder_set_[p] || shard_gradient_set_[p];
      continue;
    }
    any_zeroed = true;
  }
  if (!any_zeroed) return;
  if (!any_left && !pass_) return zero();
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined() || !detect_zeroed(p)) continue;
    sums_[model_->plan().bucket_of[p]].drop(model_->plan().placement_of[p]);
    deferred_[p] = at::Tensor();
    placeholder_set_[p] = shard_gradient_set_[p] = has_gradient_[p] = false;
    shards_[p].mutable_grad() = at::Tensor();
    model_->parameters()[p].tensor.mutable_grad() = at::Tensor();
    zeroed_[p] = 1;
  }
  record_.valid = false;
}

bool Reducer::detect_zeroed(int64_t parameter) const {
  return (placeholder_set_[parameter] && !model_->parameters()[parameter].tensor.grad().defined()) ||
         (shard_gradient_set_[parameter] && !shards_[parameter].grad().defined());
}

void Reducer::begin_pass(bool deferred) {
  const auto count = static_cast<size_t>(model_->size());
  notice_changes();
  Pass pass;
  pass.deferred = deferred;
  pass.overlapped = learnt_ && model_->options().overlap();
  pass.scale = current_pass_scale();
  refuse_foreign_gradients();
  pass.contributions.assign(count, 0);
  pass.leaf.assign(count, 0);
  pass.posted.assign(sums_.size(), 0);
  pass.first_area = area_cursor_;
  for (const auto& bucket : model_->plan().buckets) {
    int missing = 0;
    for (const auto& placement : bucket.placements) missing += is_frozen(placement.parameter) ? 0 : 1;
    pass.missing.push_back(missing);
  }
  finished_ = false;
  record_.valid = false;
  pass_ = std::move(pass);
}

void Reducer::end_pass() {
  if (!pass_) return;
  if (pass_->deferred) return end_deferred_pass();
  end_synchronised_pass();
}

void Reducer::abandon_pass() {
  if (!pass_) return;
  if (!broken_.empty()) return pass_.reset();
  pass_->abandoned = true;
  if (pass_->deferred) {
    taint_ =
        me() + " backward: a pass under NoSyncGuard was left by an exception; call zero_grad() and run the step again";
    note_error(taint_);
    pass_.reset();
    return;
  }
  note_error("a backward pass was left by an exception");
  try {
    end_synchronised_pass();
  } catch (const std::exception& error) {
    if (taint_.empty()) taint_ = comm::text_of(error);
  }
}

void Reducer::empty_pass() {
  throw_if_broken();
  tracker_->close_abandoned();
  TORCH_CHECK(!pass_, me(), " empty_pass: a backward pass is running; call it between passes");
  begin_pass(/*deferred=*/false);
  pass_->overlapped = false;
  pass_->scale = kAnyScale;
  end_synchronised_pass();
}

// A gradient that somebody put into .grad in place of the one that was reduced away would be lost.
void Reducer::refuse_foreign_gradients() {
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined()) continue;
    const auto& name = model_->parameters()[p].name;
    const auto& gradient = model_->parameters()[p].tensor.grad();
    if (placeholder_set_[p] && gradient.defined() && !gradient.is_same(placeholders_[p])) {
      note_error("the .grad of '" + name +
                 "' was replaced after its backward pass, when it had been reduced away; write to the shard's grad() "
                 "after finish_reduction(), or use a hook on the parameter");
    }
    if (!shard_gradient_set_[p] && shards_[p].grad().defined()) {
      note_error("the grad() of the shard of '" + name +
                 "' was set by hand while no gradient was reduced for it; run a backward pass (or empty_pass()) and "
                 "finish_reduction() first, then write to it");
    }
  }
}

// Ranks without a leaf in this pass take the scale that the others used.
void Reducer::settle_scale(uint64_t seq) {
  MessageHeader header;
  for (int r = 0; r < model_->world() && pass_->scale < 0; ++r) {
    std::memcpy(&header, channel_->record(r, seq), sizeof header);
    pass_->scale = header.scale;
  }
}

void Reducer::end_deferred_pass() {
  auto pass = std::move(*pass_);
  pass_.reset();
  if (deferred_scale_ >= 0 && deferred_scale_ != pass.scale) {
    note_error("passes under one NoSyncGuard used the loss scales " + std::to_string(deferred_scale_) + " and " +
               std::to_string(pass.scale) +
               " (0: not scaled); scale every loss of a step with the same ShardedGradScaler and update() after it");
  }
  deferred_scale_ = pass.scale;
  ++deferred_passes_;
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (pass.contributions[p] == 0) continue;
    auto leaf = take_leaf(p);
    if (!leaf.defined()) continue;
    auto wide = leaf.to(model_->parameters()[p].master_dtype);
    if (deferred_[p].defined()) {
      deferred_[p].add_(wide);
    } else {
      deferred_[p] = std::move(wide);
    }
    place_placeholder(p);
  }
}

void Reducer::end_synchronised_pass() {
  RECORD_FUNCTION("trueshard::reduce_gradients", std::vector<c10::IValue>());
  auto& pass = *pass_;
  try {
    if (deferred_scale_ >= 0 && pass.scale >= 0 && deferred_scale_ != pass.scale && !pass.abandoned) {
      note_error("the pass that ends a NoSyncGuard used the loss scale " + std::to_string(pass.scale) +
                 ", the passes inside " + std::to_string(deferred_scale_) +
                 " (0: not scaled); scale every loss of a step with the same ShardedGradScaler");
    }
    if (tree_scale_ >= 0 && pass.scale >= 0 && tree_scale_ != pass.scale && !pass.abandoned) {
      note_error("passes of one step used the loss scales " + std::to_string(tree_scale_) + " and " +
                 std::to_string(pass.scale) +
                 " (0: not scaled); scale every loss of a step with the same ShardedGradScaler and update() after it");
    }
    const int64_t buckets = static_cast<int64_t>(sums_.size());
    pass.missing.assign(sums_.size(), 0);  // whatever has not come does not come any more
    while (pass.next_sum < buckets) {
      advance(/*may_wait=*/true);
      if (pass.next_sum < buckets) sum_bucket(pass.next_sum);
    }
  } catch (const c10::DistBackendError& error) {
    pass_.reset();
    break_off(error);
  }
  if (!pass.abandoned) {
    for (size_t p = 0; p < expected_.size(); ++p) expected_[p] = std::max(expected_[p], pass.contributions[p]);
    learnt_ = true;
  }
  if (tree_scale_ < 0) tree_scale_ = pass.scale;
  std::fill(zeroed_.begin(), zeroed_.end(), uint8_t{0});
  area_cursor_ = (pass.first_area + static_cast<int64_t>(sums_.size())) % area_count_;
  pass_.reset();
  ++passes_;
  deferred_passes_ = 0;
  deferred_scale_ = -1;
  if (error_told_) local_error_.clear();
  error_told_ = false;
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined() || shard_gradient_set_[p]) continue;
    const auto& sums = sums_[model_->plan().bucket_of[p]];
    if (!sums.has_sum(model_->plan().placement_of[p])) continue;
    shards_[p].mutable_grad() = shard_placeholders_[p];
    shard_gradient_set_[p] = true;
    // Also where this rank had no leaf: zeroing through the module must look alike on all ranks.
    if (!placeholder_set_[p] && !model_->parameters()[p].tensor.grad().defined()) place_placeholder(p);
  }
  TORCH_CHECK(taint_.empty(), taint_);
}

}  // namespace trueshard::engine
