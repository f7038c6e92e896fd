// SPDX-License-Identifier: BSD-3-Clause
// Construction: agreement, initial values, shards and their state. The steps of training are in session_step.cpp.
#include "plugin/optim/session.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Version.h>
#include <c10/util/Logging.h>

#include <cmath>
#include <sstream>
#include <unordered_map>

#include "plugin/comm/backend.h"
#include "plugin/comm/errors.h"
#include "plugin/engine/agreement.h"
#include "plugin/engine/dtypes.h"

namespace trueshard::optim {

namespace {

void validate(const ShardOptions& options) {
  const int stage = static_cast<int>(options.stage());
  TORCH_CHECK(stage >= 0 && stage <= 3, "ShardOptions.stage is ", stage,
              "; expected Stage::Replicated (0), Zero1 (1), Zero2 (2) or Zero3 (3)");
  TORCH_CHECK(options.bucket_bytes() >= 1, "ShardOptions.bucket_bytes is ", options.bucket_bytes(),
              "; expected at least 1");
  TORCH_CHECK(options.unit_bytes() >= 1, "ShardOptions.unit_bytes is ", options.unit_bytes(), "; expected at least 1");
  TORCH_CHECK(options.resident_bytes().value_or(0) >= 0, "ShardOptions.resident_bytes is ",
              options.resident_bytes().value_or(0), "; expected 0 or more");
  TORCH_CHECK(options.prefetch_units() >= 0, "ShardOptions.prefetch_units is ", options.prefetch_units(),
              "; expected 0 or more");
  if (const auto divisor = options.gradient_divide_factor()) {
    TORCH_CHECK(
        std::isfinite(*divisor) && static_cast<float>(*divisor) != 0.0f && std::isfinite(static_cast<float>(*divisor)),
        "ShardOptions.gradient_divide_factor is ", *divisor, "; expected a finite number other than 0");
  }
  if (const auto dtype = options.mp_policy().param_dtype()) {
    TORCH_CHECK(engine::is_16bit(*dtype) || *dtype == c10::kFloat, "MixedPrecisionPolicy.param_dtype is ",
                c10::toString(*dtype), "; expected bfloat16, float16 or float32");
    TORCH_CHECK(!options.low_precision_master(),
                "ShardOptions.low_precision_master(true) is for modules that are 16-bit themselves; "
                "a MixedPrecisionPolicy keeps fp32 masters. Choose one of the two");
  }
}

std::string describe(const ShardOptions& options) {
  std::ostringstream text;
  text << "stage " << static_cast<int>(options.stage()) << " unit_bytes " << options.unit_bytes() << " resident_bytes "
       << options.resident_bytes().value_or(-1) << " prefetch_units " << options.prefetch_units()
       << " share_parameters " << options.share_parameters() << " bucket_bytes " << options.bucket_bytes()
       << " overlap " << options.overlap() << " gradient_divide_factor ";
  if (options.gradient_divide_factor()) text << std::hexfloat << *options.gradient_divide_factor() << std::defaultfloat;
  text << " skip_nonfinite_steps " << options.skip_nonfinite_steps() << " low_precision_master "
       << options.low_precision_master() << " param_dtype ";
  if (options.mp_policy().param_dtype()) text << c10::toString(*options.mp_policy().param_dtype());
  for (const auto& name : options.mp_policy().full_precision_modules()) text << " full precision " << name;
  for (const auto& name : options.units()) text << " unit " << name;
  return text.str();
}

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes() << " strides " << tensor.strides();
  return text.str();
}

// The tensor's elements in its own memory order.
at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

}  // namespace

Session::Session(const engine::ModuleView& view, std::unique_ptr<torch::optim::Optimizer> optimizer,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, const ShardOptions& options)
    : options_(options),
      group_(std::move(group)),
      transport_(comm::transport_of(*group_)),
      inner_(std::move(optimizer)) {
  const std::string name = "optimizer " + std::to_string(engine::BackwardTracker::of(transport_)->next_number());
  agree(view, name);
  spread_initial_values(view);
  model_ = std::make_shared<engine::ShardedModel>(transport_, name, view, groups_, options_);
  make_shards();
  shard_state();
  reducer_ = std::make_unique<engine::Reducer>(model_, shards_);
  publisher_ = std::make_unique<engine::Publisher>(model_, *reducer_);
  norms_ = std::make_unique<engine::NormExchange>(model_, *reducer_, [this] { materialize(); });
  const auto text = engine::describe_upcast(*model_);
  if (!text.empty() && transport_->rank() == 0) LOG(WARNING) << text;
}

Session::~Session() = default;

void Session::agree(const engine::ModuleView& view, const std::string& name) {
  engine::Statement statement;
  groups_.assign(view.parameters.size(), -1);
  try {
    TORCH_CHECK(view.error.empty(), view.error);
    validate(options_);
    TORCH_CHECK(inner_ != nullptr, "the optimizer is null");
    kind_ = require_elementwise(*inner_, options_.assume_elementwise());
    TORCH_CHECK(!view.parameters.empty(),
                "the module has no parameters; shard a TorchScript module before torch::jit::freeze or "
                "optimize_for_inference, which turn parameters into constants");
    engine::check_shardable(view);
    if (options_.stage() == Stage::Zero3) engine::check_units(view, options_);
    std::unordered_map<c10::TensorImpl*, size_t> index;
    for (size_t i = 0; i < view.parameters.size(); ++i) index[view.parameters[i].tensor.unsafeGetTensorImpl()] = i;
    for (size_t g = 0; g < inner_->param_groups().size(); ++g) {
      members_.emplace_back();
      for (const auto& tensor : inner_->param_groups()[g].params()) {
        const auto found = index.find(tensor.unsafeGetTensorImpl());
        TORCH_CHECK(found != index.end(), "the optimizer holds a tensor (", describe(tensor), ", group ", g,
                    ") that is not a parameter of the module; build it over module.parameters() of the module that is "
                    "given to shard()");
        if (groups_[found->second] >= 0) continue;  // the same tensor once more
        TORCH_CHECK(!engine::managed_by_an_optimizer(tensor), "parameter '", view.parameters[found->second].name,
                    "' belongs to another sharded optimizer already; give each parameter to one optimizer");
        groups_[found->second] = static_cast<int>(g);
        members_[g].push_back(static_cast<int64_t>(found->second));
      }
    }
    TORCH_CHECK(kind_ != Kind::kUnknown || inner_->state().empty(),
                "the optimizer has state already, of a type that can not be cut into shards; call shard() before its "
                "first step");
  } catch (const std::exception& error) {
    statement.local_error = comm::text_of(error);
  }
  statement.lines.push_back("options " + describe(options_));
  statement.lines.push_back("ATEN_CPU_CAPABILITY " + at::get_cpu_capability());
  if (inner_) {
    statement.lines.push_back("optimizer " + type_name(*inner_));
    for (auto& options_group : inner_->param_groups()) {
      statement.lines.push_back("group of " + std::to_string(options_group.params().size()) + " parameters:" +
                                (options_group.has_options() ? optim::describe(options_group.options()) : ""));
    }
  }
  for (size_t i = 0; i < view.parameters.size(); ++i) {
    const auto& p = view.parameters[i];
    std::string line = "parameter '" + p.name + "' " + describe(p.tensor) +
                       (p.tensor.requires_grad() ? " trainable" : " frozen") + " group " + std::to_string(groups_[i]);
    for (const auto& other : p.other_names) line += " also '" + other + "'";
    if (inner_) {
      const auto state = inner_->state().find(p.tensor.unsafeGetTensorImpl());
      if (state != inner_->state().end()) line += " state " + optim::describe(kind_, state->second.get());
    }
    statement.lines.push_back(std::move(line));
  }
  for (const auto& b : view.buffers) statement.lines.push_back("buffer '" + b.name + "' " + describe(b.tensor));
  engine::require_agreement(
      transport_, name + "/agreement", statement, "shard",
      "build the same module, optimizer and options on all ranks (for ATEN_CPU_CAPABILITY: set that variable alike, "
      "libtorch's results depend on it)");
}

void Session::spread_initial_values(const engine::ModuleView& view) {
  if (transport_->size() == 1) return;
  std::vector<at::Tensor> tensors;
  std::vector<engine::PinnedStorage> whole;  // another optimizer may have freed them
  for (const auto& p : view.parameters) {
    whole.emplace_back(p.tensor.storage().unsafeGetStorageImpl());
    auto* values = const_cast<void*>(p.tensor.const_data_ptr());  // plain: no operator watches it
    tensors.push_back(at::from_blob(values, {p.tensor.numel()}, at::TensorOptions().dtype(p.tensor.scalar_type())));
  }
  for (const auto& b : view.buffers) tensors.push_back(b.tensor.detach());
  uint64_t digest = plan::digest(nullptr, 0);
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.contiguous();
    digest = plan::digest(bytes.const_data_ptr(), static_cast<int64_t>(bytes.nbytes()), digest);
  }
  const auto digests = engine::exchange_texts(
      transport_, "initial values " + std::to_string(engine::BackwardTracker::of(transport_)->next_number()),
      std::to_string(digest));
  bool differ = false;
  for (const auto& each : digests) differ |= each != digests[0];
  if (differ && transport_->rank() == 0) {
    LOG(WARNING) << "trueshard: ranks started with different parameters or buffers; all of them now have rank 0's "
                    "(seed alike to avoid this)";
  }
  for (size_t i = 0; i < view.parameters.size(); ++i) {
    const auto state = inner_->state().find(view.parameters[i].tensor.unsafeGetTensorImpl());
    if (state == inner_->state().end()) continue;
    transform_tensors(kind_, *state->second, [&](const at::Tensor& tensor) {
      tensors.push_back(tensor.contiguous().clone());
      return tensors.back();
    });
    differ = true;
  }
  if (!differ) return;
  at::NoGradGuard no_grad;
  for (auto& tensor : tensors) {
    std::vector<at::Tensor> one{tensor};
    c10d::BroadcastOptions from_zero;
    from_zero.rootRank = 0;
    group_->broadcast(one, from_zero)->wait();
  }
}

void Session::make_shards() {
  shards_.assign(static_cast<size_t>(model_->size()), at::Tensor());
  for (int64_t p = 0; p < model_->size(); ++p) {
    const auto& parameter = model_->parameters()[p];
    if (parameter.group < 0) continue;
    const auto dtype = parameter.low_precision_master ? parameter.compute_dtype : parameter.master_dtype;
    const int64_t count = model_->owned(p, model_->rank()).size();
    shards_[p] = count > 0 ? model_->flat_tensor_over(model_->master(p, model_->rank()), count, dtype)
                           : at::empty({0}, at::TensorOptions().dtype(dtype));
    shards_[p].set_requires_grad(true);
  }
  pending_stand_ins_.assign(shards_.size(), at::Tensor());
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!shards_[p].defined()) continue;
    pending_stand_ins_[p] = engine::make_placeholder(
        shards_[p], "trueshard: the gradient of the shard of '" + model_->parameters()[p].name +
                        "' waits for its unscale and clip factors, which the step applies; read it through "
                        "ShardedOptimizer::param_groups() "
                        "or parameters() (not through torch::optim::Optimizer&), which applies them first");
  }
}

void Session::shard_state() {
  for (int64_t p = 0; p < model_->size(); ++p) {
    auto& parameter = model_->parameters()[p];
    if (!shards_[p].defined()) continue;
    const auto found = inner_->state().find(parameter.tensor.unsafeGetTensorImpl());
    if (found == inner_->state().end()) continue;
    auto state = std::move(found->second);
    inner_->state().erase(found);
    const auto range = model_->owned(p, model_->rank());
    transform_tensors(kind_, *state, [&](const at::Tensor& tensor) {
      auto ordered =
          at::empty_strided(parameter.sizes, parameter.strides, tensor.options().dtype(shards_[p].scalar_type()));
      ordered.copy_(tensor);
      return flat(ordered).narrow(0, range.empty() ? 0 : range.begin, range.empty() ? 0 : range.size()).clone();
    });
    inner_->state()[shards_[p].unsafeGetTensorImpl()] = std::move(state);
  }
}

void Session::adopt_into(ShardedOptimizer& outer) {
  outer_ = &outer;
  outer.param_groups_ = std::move(inner_->param_groups());
  outer.state_ = std::move(inner_->state());
  for (size_t g = 0; g < outer.param_groups_.size(); ++g) {
    auto& params = outer.param_groups_[g].params();
    params.clear();
    for (const auto p : members_[g]) params.push_back(shards_[p]);
  }
  inner_->param_groups().clear();
  inner_->state().clear();
}

}  // namespace trueshard::optim
