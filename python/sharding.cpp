// SPDX-License-Identifier: BSD-3-Clause
// The engine for Python's modules. Python hands over names, tensors, the optimizer's kind and options; everything else
// is what C++ users get. Calls that may wait release the interpreter's lock.
#include "python/sharding.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <trueshard/trueshard.h>

#include "plugin/api/shard_listing.h"

namespace trueshard::python {
namespace {

namespace py = pybind11;
namespace optim = torch::optim;
using Unlocked = py::call_guard<py::gil_scoped_release>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

double number(const py::dict& options, const char* name) { return options[name].cast<double>(); }
bool flag(const py::dict& options, const char* name) { return options[name].cast<bool>(); }

void read(optim::AdamOptions& into, const py::dict& from) {
  into.lr(number(from, "lr")).betas(from["betas"].cast<std::tuple<double, double>>()).eps(number(from, "eps"));
  into.weight_decay(number(from, "weight_decay")).amsgrad(flag(from, "amsgrad"));
}
void read(optim::AdamWOptions& into, const py::dict& from) {
  into.lr(number(from, "lr")).betas(from["betas"].cast<std::tuple<double, double>>()).eps(number(from, "eps"));
  into.weight_decay(number(from, "weight_decay")).amsgrad(flag(from, "amsgrad"));
}
void read(optim::SGDOptions& into, const py::dict& from) {
  into.lr(number(from, "lr")).momentum(number(from, "momentum")).dampening(number(from, "dampening"));
  into.weight_decay(number(from, "weight_decay")).nesterov(flag(from, "nesterov"));
}
void read(optim::RMSpropOptions& into, const py::dict& from) {
  into.lr(number(from, "lr")).alpha(number(from, "alpha")).eps(number(from, "eps"));
  into.weight_decay(number(from, "weight_decay")).momentum(number(from, "momentum")).centered(flag(from, "centered"));
}
void read(optim::AdagradOptions& into, const py::dict& from) {
  into.lr(number(from, "lr")).lr_decay(number(from, "lr_decay")).weight_decay(number(from, "weight_decay"));
  into.initial_accumulator_value(number(from, "initial_accumulator_value")).eps(number(from, "eps"));
}

using Groups = std::vector<std::pair<std::vector<at::Tensor>, py::dict>>;

template <typename Optimizer, typename Options>
std::unique_ptr<optim::Optimizer> make(const Groups& groups) {
  std::vector<optim::OptimizerParamGroup> made;
  Options options(1e-3);
  for (const auto& [tensors, from] : groups) {
    read(options, from);
    made.emplace_back(tensors, std::make_unique<Options>(options));
  }
  return std::make_unique<Optimizer>(std::move(made), options);
}

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& kind, const Groups& groups) {
  if (kind == "Adam") return make<optim::Adam, optim::AdamOptions>(groups);
  if (kind == "AdamW") return make<optim::AdamW, optim::AdamWOptions>(groups);
  if (kind == "SGD") return make<optim::SGD, optim::SGDOptions>(groups);
  if (kind == "RMSprop") return make<optim::RMSprop, optim::RMSpropOptions>(groups);
  if (kind == "Adagrad") return make<optim::Adagrad, optim::AdagradOptions>(groups);
  throw py::value_error("trueshard shard: unknown optimizer " + kind);
}

// The options of one group, which schedulers change.
void set_options(ShardedOptimizer& optimizer, size_t group, const py::dict& from) {
  auto& options = static_cast<optim::Optimizer&>(optimizer).param_groups().at(group).options();
  if (auto* adam = dynamic_cast<optim::AdamOptions*>(&options)) return read(*adam, from);
  if (auto* adamw = dynamic_cast<optim::AdamWOptions*>(&options)) return read(*adamw, from);
  if (auto* sgd = dynamic_cast<optim::SGDOptions*>(&options)) return read(*sgd, from);
  if (auto* rmsprop = dynamic_cast<optim::RMSpropOptions*>(&options)) return read(*rmsprop, from);
  if (auto* adagrad = dynamic_cast<optim::AdagradOptions*>(&options)) return read(*adagrad, from);
}

template <typename Value>
void take(const py::dict& from, const char* name, const std::function<void(const Value&)>& set) {
  if (from.contains(name) && !from[name].is_none()) set(from[name].cast<Value>());
}

ShardOptions read_shard_options(const py::dict& from) {
  ShardOptions options;
  MixedPrecisionPolicy policy;
  take<int>(from, "stage", [&](int stage) { options.stage(static_cast<Stage>(stage)); });
  take<at::ScalarType>(from, "param_dtype", [&](at::ScalarType dtype) { policy.param_dtype(dtype); });
  take<std::vector<std::string>>(from, "full_precision_modules",
                                 [&](const auto& v) { policy.full_precision_modules(v); });
  take<std::vector<std::string>>(from, "units", [&](const auto& v) { options.units(v); });
  take<int64_t>(from, "unit_bytes", [&](int64_t v) { options.unit_bytes(v); });
  take<int64_t>(from, "resident_bytes", [&](int64_t v) { options.resident_bytes(v); });
  take<int64_t>(from, "prefetch_units", [&](int64_t v) { options.prefetch_units(v); });
  take<int64_t>(from, "bucket_bytes", [&](int64_t v) { options.bucket_bytes(v); });
  take<bool>(from, "overlap", [&](bool v) { options.overlap(v); });
  take<double>(from, "gradient_divide_factor", [&](double v) { options.gradient_divide_factor(v); });
  take<bool>(from, "skip_nonfinite_steps", [&](bool v) { options.skip_nonfinite_steps(v); });
  take<bool>(from, "low_precision_master", [&](bool v) { options.low_precision_master(v); });
  take<bool>(from, "share_parameters", [&](bool v) { options.share_parameters(v); });
  return options.mp_policy(policy);
}

using Named = std::vector<std::pair<std::string, at::Tensor>>;
using Names = std::vector<std::string>;

struct PythonModule {
  Named parameters, buffers;
  Names modules, norm_modules;
};

std::unique_ptr<ShardedOptimizer> shard_module(const PythonModule& module, const std::string& kind,
                                               const Groups& groups, const GroupPtr& group, const py::dict& options) {
  const auto shard_options = read_shard_options(options);
  auto optimizer = make_optimizer(kind, groups);
  const py::gil_scoped_release release;
  return shard_listing({module.parameters, module.buffers, module.modules, module.norm_modules}, std::move(optimizer),
                       group, shard_options);
}

py::dict metrics(const ShardedOptimizer& optimizer) {
  const auto m = optimizer.metrics();
  py::dict memory;
  memory["parameters"] = m.memory.parameters;
  memory["masters"] = m.memory.masters;
  memory["gradients"] = m.memory.gradients;
  memory["partial_sums"] = m.memory.partial_sums;
  memory["deferred"] = m.memory.deferred;
  memory["optimizer_state"] = m.memory.optimizer_state;
  memory["exchange"] = m.memory.exchange;
  py::dict result;
  result["steps"] = m.steps;
  result["skipped_steps"] = m.skipped_steps;
  result["loss_scale"] = m.loss_scale;
  result["grad_norm"] = m.grad_norm;
  result["bytes_reduced"] = m.bytes_reduced;
  result["bytes_gathered"] = m.bytes_gathered;
  result["collectives"] = m.collectives;
  result["seconds_waited"] = m.seconds_waited;
  result["seconds_communicating"] = m.seconds_communicating;
  result["passes"] = m.passes;
  result["memory"] = memory;
  return result;
}

std::vector<at::Tensor> shards(ShardedOptimizer& optimizer, size_t group) {
  return static_cast<optim::Optimizer&>(optimizer).param_groups().at(group).params();
}

Named full_state(ShardedOptimizer& optimizer, bool rank0_only) {
  Named result;
  for (const auto& item : full_state_dict(optimizer, rank0_only)) result.emplace_back(item.key(), item.value());
  return result;
}

void bind_optimizer(py::module_& module) {
  py::class_<ShardedOptimizer>(module, "ShardedOptimizer")
      .def(
          "step", [](ShardedOptimizer& self) { self.step(); }, Unlocked())
      .def("zero_grad", &ShardedOptimizer::zero_grad, Unlocked())
      .def("finish_reduction", &ShardedOptimizer::finish_reduction, Unlocked())
      .def("empty_pass", &ShardedOptimizer::empty_pass, Unlocked())
      .def("full_state_dict", &full_state, Unlocked())
      .def("shards", &shards)
      .def("set_options", &set_options)
      .def("metrics", &metrics);
  py::class_<NoSyncGuard>(module, "NoSyncGuard").def(py::init<ShardedOptimizer&>(), py::keep_alive<1, 2>());
  py::class_<FullParametersGuard>(module, "FullParametersGuard")
      .def(py::init<ShardedOptimizer&>(), py::keep_alive<1, 2>(), Unlocked())
      .def("broadcast", &FullParametersGuard::broadcast, Unlocked());
}

}  // namespace

void bind_sharding(py::module_& module) {
  bind_optimizer(module);
  py::class_<PythonModule>(module, "ModuleListing").def(py::init<Named, Named, Names, Names>());
  module.def("shard", &shard_module);
  module.def(
      "clip_grad_norm_",
      [](const std::vector<ShardedOptimizer*>& optimizers, double max_norm, double norm_type, bool error_if_nonfinite) {
        return clip_grad_norm_(optimizers, max_norm, norm_type, error_if_nonfinite);
      },
      Unlocked());
  py::class_<ShardedGradScaler>(module, "ShardedGradScaler")
      .def(py::init([](const GroupPtr& group, double init_scale, double growth_factor, double backoff_factor,
                       int64_t growth_interval, bool enabled) {
        return std::make_unique<ShardedGradScaler>(group, GradScalerOptions()
                                                              .init_scale(init_scale)
                                                              .growth_factor(growth_factor)
                                                              .backoff_factor(backoff_factor)
                                                              .growth_interval(growth_interval)
                                                              .enabled(enabled));
      }))
      .def("scale", &ShardedGradScaler::scale, Unlocked())
      .def("unscale_", &ShardedGradScaler::unscale_, Unlocked())
      .def("step", &ShardedGradScaler::step, Unlocked())
      .def("update", &ShardedGradScaler::update)
      .def("get_scale", &ShardedGradScaler::get_scale)
      .def("growth_tracker", &ShardedGradScaler::growth_tracker)
      .def("skipped_steps", &ShardedGradScaler::skipped_steps)
      .def("enabled", &ShardedGradScaler::enabled);
}

}  // namespace trueshard::python
