// SPDX-License-Identifier: BSD-3-Clause
// The steps of training: finish, unscale, norm, clip, step, publish.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <sstream>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/parallel.h"
#include "plugin/optim/fused_step.h"
#include "plugin/optim/session.h"

namespace trueshard::optim {

namespace {

// Runs the wrapped optimizer on the outer one's groups and state.
class BorrowedGroups {
 public:
  BorrowedGroups(torch::optim::Optimizer& outer, torch::optim::Optimizer& inner) : outer_(outer), inner_(inner) {
    exchange();
  }
  ~BorrowedGroups() { exchange(); }
  BorrowedGroups(const BorrowedGroups&) = delete;
  BorrowedGroups& operator=(const BorrowedGroups&) = delete;

 private:
  void exchange() {
    std::swap(outer_.param_groups(), inner_.param_groups());
    std::swap(outer_.state(), inner_.state());
  }
  torch::optim::Optimizer& outer_;
  torch::optim::Optimizer& inner_;
};

// In the same memory order.
at::Tensor copy_of(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).copy_(tensor);
}

}  // namespace

// ---- reduction -----------------------------------------------------------------------------------------------------

void Session::require_groups() const {
  const auto& groups = static_cast<const torch::optim::Optimizer&>(*outer_).param_groups();
  bool same = groups.size() == members_.size();
  for (size_t g = 0; same && g < groups.size(); ++g) {
    same = groups[g].params().size() == members_[g].size();
    for (size_t i = 0; same && i < members_[g].size(); ++i)
      same = groups[g].params()[i].is_same(shards_[members_[g][i]]);
  }
  TORCH_CHECK(same, me(),
              " step: the parameter groups of the sharded optimizer were changed; make all groups before shard()");
}

uint64_t Session::changes_digest() {
  uint64_t digest = guard_digest_;
  changes_.clear();
  model_->look_for_writes();
  for (int64_t p = 0; p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    if (parameter.numel == 0 || !model_->manages(p)) continue;
    if (parameter.tensor.scalar_type() != parameter.compute_dtype || parameter.tensor.sizes() != parameter.sizes) {
      std::ostringstream text;
      text << "parameter '" << parameter.name << "' is " << c10::toString(parameter.tensor.scalar_type()) << ' '
           << parameter.tensor.sizes() << " now; it was " << c10::toString(parameter.compute_dtype) << ' '
           << at::IntArrayRef(parameter.sizes)
           << " when it was sharded; call shard() after .to(dtype), or use MixedPrecisionPolicy().param_dtype()";
      reducer_->note_error(text.str());
      digest = plan::digest(parameter.name.data(), static_cast<int64_t>(parameter.name.size()), digest | 1);
      continue;
    }
    if (!model_->changed(p)) continue;
    digest = plan::digest(parameter.name.data(), static_cast<int64_t>(parameter.name.size()), digest | 1);
    const auto shown = model_->shown(p);
    digest = plan::digest(shown.data(), parameter.numel * model_->compute_itemsize(p), digest);
    changes_.push_back({p, model_->shows_foreign_memory(p) ? copy_of(shown.tensor) : at::Tensor()});
  }
  return digest;
}

void Session::adopt_changes() {
  bool any = diverged_;  // else the same on all ranks
  for (const auto& change : std::exchange(changes_, {})) {
    if (change.copy.defined()) {
      model_->adopt(change.parameter, static_cast<const std::byte*>(change.copy.const_data_ptr()));
    } else {
      const auto shown = model_->shown(change.parameter);
      model_->adopt(change.parameter, shown.data());
    }
    any = true;
  }
  model_->share_changes();
  if (any) model_->masters_changed();
}

void Session::finish_reduction() {
  TORCH_CHECK(full_depth_ == 0, me(), " finish_reduction: a FullParametersGuard is alive; leave it first");
  const double scale = reducer_->tree_scale();
  reducer_->notice_changes();
  if (reducer_->finished()) return;
  if (reducer_->has_base() && scale >= 0 && !reducer_->base_is_zero()) {
    const double there = unscaled_ ? 0.0 : reducer_->scale();
    if (scale != there) {
      reducer_->note_error("new passes have the loss scale " + std::to_string(scale) +
                           ", the gradients that are there have " + std::to_string(there) +
                           " (0: not scaled, or unscaled already); call zero_grad() before the next backward");
    }
  }
  materialize();
  const uint64_t digest = changes_digest();
  reducer_->finish(digest);
  if (digest != 0) adopt_changes();
  guard_digest_ = 0;
  if (scale >= 0) unscaled_ = false;
  pending_ = {};
  record_factor_ = 1.0;
}

void Session::zero_grad(bool set_to_none) {
  transport_->check_process("zero_grad");
  if (set_to_none) {
    reducer_->zero();
  } else {
    reducer_->zero_in_place();
  }
  pending_ = {};
  hidden_ = false;
  unscaled_ = false;
  record_factor_ = 1.0;
}

void Session::empty_pass() { reducer_->empty_pass(); }

// ---- unscale and clip ----------------------------------------------------------------------------------------------

void Session::materialize() {
  if (!hidden_) return;
  hidden_ = false;
  const auto factors = std::exchange(pending_, {});
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!reducer_->has_gradient(p)) continue;
    const auto dtype = engine::kernel_dtype(model_->parameters()[p].master_dtype);
    const bool fp64 = dtype == kernels::DType::kFloat64;
    engine::for_blocks(model_->owned(p, model_->rank()).size(), [&](int64_t begin, int64_t end) {
      auto* data = model_->gradient(p) + begin * kernels::itemsize(dtype);
      if (factors.unscale)
        kernels::kernels().scale(data, dtype, end - begin,
                                 fp64 ? pending_inverse_ : static_cast<double>(factors.inverse_scale));
      if (factors.clip)
        kernels::kernels().scale(data, dtype, end - begin, static_cast<double>(factors.clip_coefficient));
    });
  }
  reducer_->reshow_gradients();
}

// This rank's gradients, read (and multiplied, when `unscale`) once more because somebody wrote to them.
bool Session::check_finite(bool unscale) {
  std::atomic<bool> bad{false};
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!reducer_->has_gradient(p) || !shards_[p].grad().defined()) continue;
    auto gradient = shards_[p].grad();
    TORCH_CHECK(gradient.is_contiguous(), me(), " unscale_: the gradient of the shard of '",
                model_->parameters()[p].name, "' was replaced by a strided tensor; use a contiguous one");
    const auto dtype = engine::kernel_dtype(gradient.scalar_type());
    auto* data = static_cast<std::byte*>(gradient.data_ptr());
    engine::for_blocks(gradient.numel(), [&](int64_t begin, int64_t end) {
      uint8_t nonfinite = 0;
      kernels::kernels().unscale_and_check(data + begin * kernels::itemsize(dtype), dtype, end - begin,
                                           unscale ? pending_inverse_ : 1.0, &nonfinite);
      if (nonfinite) bad.store(true, std::memory_order_relaxed);
    });
  }
  return bad.load();
}

bool Session::unscale() {
  finish_reduction();
  TORCH_CHECK(!unscaled_, me(),
              " unscale_: the gradients of this optimizer were unscaled already in this step; call unscale_ once per "
              "step, after the last backward");
  const double scale = reducer_->scale();
  pending_inverse_ = scale != 0 ? 1.0 / scale : 1.0;
  const bool multiply = scale != 0 && scale != 1.0;
  bool local;
  if (reducer_->record_is_current()) {
    local = reducer_->record().nonfinite;
    if (multiply) {
      pending_.unscale = true;
      pending_.inverse_scale = static_cast<float>(pending_inverse_);
      reducer_->hide_gradients(pending_stand_ins_);
      hidden_ = true;
    }
    record_factor_ = pending_inverse_;
  } else {
    local = check_finite(multiply);
    reducer_->record().valid = false;
  }
  found_nonfinite_ = reducer_->agree_any("found non-finite", local);
  unscaled_ = true;
  return found_nonfinite_;
}

void Session::check_clippable() {
  finish_reduction();
  TORCH_CHECK(reducer_->scale() == 0 || unscaled_, me(), " clip_grad_norm_: the gradients are still scaled by ",
              reducer_->scale(), "; call ShardedGradScaler::unscale_(optimizer) first");
}

Session::NormResult Session::norm_values(const engine::NormQuery& query) {
  NormResult result;
  if (!query.allow_record) materialize();
  auto values = norms_->query(query);
  result.values = std::move(values.values);
  result.factor = values.from_record ? record_factor_ : 1.0;
  for (int64_t p = 0; p < model_->size(); ++p) result.present.push_back(reducer_->has_gradient(p));
  return result;
}

void Session::clip(double coefficient) {
  const auto factor = static_cast<float>(coefficient);
  if (reducer_->gradients_are_ours() && !pending_.clip) {
    pending_.clip = true;
    pending_.clip_coefficient = factor;
    reducer_->hide_gradients(pending_stand_ins_);
    hidden_ = true;
  } else {
    materialize();
    const at::NoGradGuard no_grad;
    for (int64_t p = 0; p < model_->size(); ++p) {
      if (reducer_->has_gradient(p) && shards_[p].grad().defined())
        shards_[p].mutable_grad().mul_(static_cast<double>(factor));
    }
  }
  reducer_->record().valid = false;
}

// ---- step ----------------------------------------------------------------------------------------------------------

// Before weights move, all ranks must see the same parameters: told with the message that ends the reduction, or with
// one of its own.
void Session::prepare_step() {
  reducer_->notice_changes();
  const bool told = !reducer_->finished();
  finish_reduction();
  if (!told) {
    reducer_->refuse_foreign_gradients();
    agree_on_changes("step");
  }
  require_groups();
}

at::Tensor Session::step(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  prepare_step();
  TORCH_CHECK(reducer_->scale() == 0 || unscaled_ || !reducer_->any_gradient(), me(),
              " step: the gradients are still scaled by ", reducer_->scale(),
              "; call ShardedGradScaler::step(optimizer), or unscale_ first");
  if (options_.skip_nonfinite_steps()) {
    const bool local =
        reducer_->record_is_current() ? reducer_->record().nonfinite : (materialize(), check_finite(false));
    if (reducer_->agree_any("found non-finite", local)) {
      ++metrics_.skipped_steps;
      return loss;
    }
  }
  apply_step();
  return loss;
}

bool Session::step_checked() {
  prepare_step();
  if (!unscaled_) unscale();
  if (found_nonfinite_) {
    ++metrics_.skipped_steps;
    return false;
  }
  apply_step();
  return true;
}

void Session::run_inner_step() {
  std::vector<at::Tensor> wide(shards_.size());
  for (size_t p = 0; p < shards_.size(); ++p) {  // libtorch wants the gradient in the parameter's dtype
    if (!shards_[p].defined() || !shards_[p].grad().defined() ||
        shards_[p].grad().scalar_type() == shards_[p].scalar_type())
      continue;
    wide[p] = shards_[p].grad();
    shards_[p].mutable_grad() = wide[p].to(shards_[p].scalar_type());
  }
  {
    BorrowedGroups borrowed(*outer_, *inner_);
    inner_->step();
  }
  for (size_t p = 0; p < shards_.size(); ++p) {
    if (wide[p].defined()) shards_[p].mutable_grad() = wide[p];
  }
}

void Session::apply_step() {
  RECORD_FUNCTION("trueshard::step", std::vector<c10::IValue>());
  if (!fused_step({*outer_, *model_, *reducer_, kind_, members_, pending_})) {
    materialize();
    run_inner_step();
    for (int64_t p = 0; p < model_->size(); ++p) {
      if (reducer_->has_gradient(p)) model_->round_to_compute(p);
    }
  }
  publisher_->publish();
  ++metrics_.steps;
}

Metrics Session::metrics() const {
  Metrics metrics = metrics_;
  const auto& counters = reducer_->counters();
  metrics.loss_scale = reducer_->scale() != 0 ? reducer_->scale() : 1.0;
  metrics.bytes_reduced = counters.bytes_reduced;
  metrics.bytes_gathered = counters.bytes_gathered + publisher_->bytes_gathered() + model_->bytes_gathered();
  metrics.collectives = static_cast<int64_t>(reducer_->channel().messages());
  metrics.seconds_waited = reducer_->channel().seconds_waited();
  metrics.seconds_communicating = counters.seconds_communicating + publisher_->seconds() + model_->seconds_gathering();
  metrics.passes = reducer_->passes();
  metrics.intra_op_threads = at::get_num_threads();
  metrics.memory = model_->memory();
  metrics.memory.partial_sums = reducer_->partial_bytes();
  metrics.memory.deferred = reducer_->deferred_bytes();
  metrics.memory.exchange = reducer_->exchange_bytes();
  for (const auto& [key, state] : static_cast<const torch::optim::Optimizer&>(*outer_).state()) {
    if (kind_ == Kind::kUnknown || !state) continue;
    transform_tensors(kind_, *state, [&](const at::Tensor& tensor) {
      metrics.memory.optimizer_state += static_cast<int64_t>(tensor.nbytes());
      return tensor;
    });
  }
  return metrics;
}

}  // namespace trueshard::optim
