// SPDX-License-Identifier: BSD-3-Clause
#include "registration/script_grad_scaler.h"

#include <limits>
#include <sstream>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "plugin/optim/scale_loss.h"
#include "registration/gradient_operators.h"
#include "registration/group_operators.h"
#include "registration/operator_checks.h"

namespace trueshard::registration {
namespace {

constexpr const char* kWho = "trueshard ShardedGradScaler";

double state_value(const ScriptGradScaler::StateDict& state, const char* key) {
  TORCH_CHECK(state.contains(key), kWho, " load_state_dict: the state has no '", key,
              "'; expected what state_dict() of a trueshard or torch.amp scaler gives");
  return state.at(key);
}

}  // namespace

ScriptGradScaler::ScriptGradScaler(std::string group_name, const LossScaleRules& rules, bool enabled)
    : group_name_(std::move(group_name)), loss_scale_(rules, kWho), enabled_(enabled) {}

at::Tensor ScriptGradScaler::scale(const at::Tensor& loss) const {
  return enabled_ ? optim::scale_loss(loss, loss_scale_.value()) : loss;
}

bool ScriptGradScaler::agree(bool found) const {
  if (group_name_.empty()) return found;
  const auto group = group_named("ShardedGradScaler", group_name_);
  return gather_numbers(*group, at::full({1}, found ? 1.0 : 0.0, at::kFloat)).max().item<float>() != 0.0f;
}

bool ScriptGradScaler::unscale_(const std::vector<at::Tensor>& gradients) {
  TORCH_CHECK(stage_ != Stage::kUnscaled && stage_ != Stage::kDecided, kWho,
              " unscale_: was already called since the last update(); once per step, after the last backward");
  check_gradients("ShardedGradScaler.unscale_", gradients);
  if (!enabled_) return true;
  const double inverse = 1.0 / loss_scale_.value();
  bool found = false;
  for (const at::Tensor& gradient : gradients) found = unscale_one(gradient, inverse) || found;
  found_inf_ = agree(found);
  stage_ = Stage::kUnscaled;
  return !found_inf_;
}

bool ScriptGradScaler::check(const std::vector<at::Tensor>& gradients) {
  TORCH_CHECK(stage_ == Stage::kFresh || stage_ == Stage::kChecked, kWho,
              " check: the gradients of this step were unscaled already; call update() first");
  check_gradients("ShardedGradScaler.check", gradients);
  if (!enabled_) return true;
  bool found = false;
  for (const at::Tensor& gradient : gradients) found = !at::isfinite(gradient).all().item<bool>() || found;
  found_inf_ = agree(found);
  stage_ = Stage::kChecked;
  return !found_inf_;
}

bool ScriptGradScaler::should_step() {
  if (!enabled_) return true;
  TORCH_CHECK(stage_ == Stage::kChecked || stage_ == Stage::kUnscaled, kWho,
              stage_ == Stage::kDecided
                  ? " should_step: was already called since the last update()"
                  : " should_step: the gradients were not looked at; call unscale_() or check() first");
  stage_ = Stage::kDecided;
  if (found_inf_) ++skipped_;
  return !found_inf_;
}

void ScriptGradScaler::update() {
  if (!enabled_) return;
  TORCH_CHECK(stage_ != Stage::kFresh, kWho,
              " update: no gradients were looked at since the last update(); call unscale_() or check() first");
  loss_scale_.update(found_inf_);
  found_inf_ = false;
  stage_ = Stage::kFresh;
}

at::Tensor ScriptGradScaler::grad_scale() const { return at::full({1}, get_scale(), at::kFloat); }
at::Tensor ScriptGradScaler::found_inf() const { return at::full({1}, found_inf_ ? 1.0 : 0.0, at::kFloat); }

ScriptGradScaler::StateDict ScriptGradScaler::state_dict() const {
  StateDict state;
  if (!enabled_) return state;  // as torch.amp.GradScaler
  state.insert("scale", loss_scale_.value());
  state.insert("growth_factor", loss_scale_.rules().growth_factor);
  state.insert("backoff_factor", loss_scale_.rules().backoff_factor);
  state.insert("growth_interval", static_cast<double>(loss_scale_.rules().growth_interval));
  state.insert("_growth_tracker", static_cast<double>(loss_scale_.growth_tracker()));
  return state;
}

void ScriptGradScaler::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  LossScaleRules rules;
  rules.init_scale = state_value(state, "scale");
  rules.growth_factor = state_value(state, "growth_factor");
  rules.backoff_factor = state_value(state, "backoff_factor");
  rules.growth_interval = static_cast<int64_t>(state_value(state, "growth_interval"));
  LossScale loaded(rules, kWho);
  loaded.restore(rules.init_scale, static_cast<int64_t>(state_value(state, "_growth_tracker")));
  loss_scale_ = loaded;
}

std::string ScriptGradScaler::describe() const {
  std::ostringstream text;
  text.precision(std::numeric_limits<double>::max_digits10);
  const LossScaleRules& rules = loss_scale_.rules();
  text << loss_scale_.value() << ' ' << rules.growth_factor << ' ' << rules.backoff_factor << ' '
       << rules.growth_interval << ' ' << loss_scale_.growth_tracker() << ' ' << skipped_ << ' ' << (enabled_ ? 1 : 0)
       << ' ' << group_name_;
  return text.str();
}

c10::intrusive_ptr<ScriptGradScaler> ScriptGradScaler::from_description(const std::string& text) {
  std::istringstream in(text);
  LossScaleRules rules;
  int64_t growth_tracker = 0, skipped = 0;
  int enabled = 0;
  std::string group_name;
  in >> rules.init_scale >> rules.growth_factor >> rules.backoff_factor >> rules.growth_interval >> growth_tracker >>
      skipped >> enabled;
  TORCH_CHECK(!in.fail(), kWho, ": the saved module holds '", text, "', which is no scaler; save it again");
  in.ignore(1);
  std::getline(in, group_name);
  auto scaler = c10::make_intrusive<ScriptGradScaler>(group_name, rules, enabled != 0);
  scaler->loss_scale_.restore(rules.init_scale, growth_tracker);
  scaler->skipped_ = skipped;
  return scaler;
}

namespace {

c10::intrusive_ptr<ScriptGradScaler> make(std::string group_name, double init_scale, double growth_factor,
                                          double backoff_factor, int64_t growth_interval, bool enabled) {
  return c10::make_intrusive<ScriptGradScaler>(
      std::move(group_name), LossScaleRules{init_scale, growth_factor, backoff_factor, growth_interval}, enabled);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(trueshard, library) {
  library.class_<ScriptGradScaler>("ShardedGradScaler")
      .def(torch::init(&make), "",
           {torch::arg("group_name"), torch::arg("init_scale") = 65536.0, torch::arg("growth_factor") = 2.0,
            torch::arg("backoff_factor") = 0.5, torch::arg("growth_interval") = 2000, torch::arg("enabled") = true})
      .def("scale", &ScriptGradScaler::scale)
      .def("unscale_", &ScriptGradScaler::unscale_)
      .def("check", &ScriptGradScaler::check)
      .def("should_step", &ScriptGradScaler::should_step)
      .def("update", &ScriptGradScaler::update)
      .def("grad_scale", &ScriptGradScaler::grad_scale)
      .def("found_inf", &ScriptGradScaler::found_inf)
      .def("get_scale", &ScriptGradScaler::get_scale)
      .def("growth_tracker", &ScriptGradScaler::growth_tracker)
      .def("skipped_steps", &ScriptGradScaler::skipped_steps)
      .def("bounds_hit", &ScriptGradScaler::bounds_hit)
      .def("is_enabled", &ScriptGradScaler::is_enabled)
      .def("state_dict", &ScriptGradScaler::state_dict)
      .def("load_state_dict", &ScriptGradScaler::load_state_dict)
      .def_pickle([](const c10::intrusive_ptr<ScriptGradScaler>& scaler) { return scaler->describe(); },
                  [](const std::string& text) { return ScriptGradScaler::from_description(text); });
}

}  // namespace trueshard::registration
