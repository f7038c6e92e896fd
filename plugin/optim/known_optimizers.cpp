// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/optim/known_optimizers.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <iomanip>
#include <sstream>

namespace trueshard::optim {

namespace topt = torch::optim;

Kind kind_of(const topt::Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  if (type == typeid(topt::Adam)) return Kind::kAdam;
  if (type == typeid(topt::AdamW)) return Kind::kAdamW;
  if (type == typeid(topt::SGD)) return Kind::kSgd;
  if (type == typeid(topt::RMSprop)) return Kind::kRmsprop;
  if (type == typeid(topt::Adagrad)) return Kind::kAdagrad;
  return Kind::kUnknown;
}

std::string type_name(const topt::Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

Kind require_elementwise(const topt::Optimizer& optimizer, bool assume_elementwise) {
  TORCH_CHECK(dynamic_cast<const topt::LBFGS*>(&optimizer) == nullptr,
              "torch::optim::LBFGS is not element-wise: its line search and dot products need whole parameters, so it "
              "can not run on shards; "
              "use Adam, AdamW, SGD, RMSprop or Adagrad");
  const Kind kind = kind_of(optimizer);
  TORCH_CHECK(kind != Kind::kUnknown || assume_elementwise, "optimizer ", type_name(optimizer),
              " is not known to treat every element by itself; if it does, say so with "
              "ShardOptions().assume_elementwise(true). "
              "Known: Adam, AdamW, SGD, RMSprop, Adagrad");
  return kind;
}

namespace {

template <typename Options, typename Visit>
bool visit_adam_like(topt::OptimizerOptions& options, const Visit& visit) {
  auto* o = dynamic_cast<Options*>(&options);
  if (!o) return false;
  visit("lr", o->lr());
  visit("beta1", std::get<0>(o->betas()));
  visit("beta2", std::get<1>(o->betas()));
  visit("eps", o->eps());
  visit("weight_decay", o->weight_decay());
  visit("amsgrad", o->amsgrad());
  return true;
}

// Calls visit(name, double& or bool&) for every option; false: not a known type.
template <typename Visit>
bool visit_options(topt::OptimizerOptions& options, const Visit& visit) {
  if (visit_adam_like<topt::AdamOptions>(options, visit) || visit_adam_like<topt::AdamWOptions>(options, visit))
    return true;
  if (auto* sgd = dynamic_cast<topt::SGDOptions*>(&options)) {
    visit("lr", sgd->lr());
    visit("momentum", sgd->momentum());
    visit("dampening", sgd->dampening());
    visit("weight_decay", sgd->weight_decay());
    visit("nesterov", sgd->nesterov());
  } else if (auto* rms = dynamic_cast<topt::RMSpropOptions*>(&options)) {
    visit("lr", rms->lr());
    visit("alpha", rms->alpha());
    visit("eps", rms->eps());
    visit("weight_decay", rms->weight_decay());
    visit("momentum", rms->momentum());
    visit("centered", rms->centered());
  } else if (auto* ada = dynamic_cast<topt::AdagradOptions*>(&options)) {
    visit("lr", ada->lr());
    visit("lr_decay", ada->lr_decay());
    visit("weight_decay", ada->weight_decay());
    visit("eps", ada->eps());
    visit("initial_accumulator_value", ada->initial_accumulator_value());
  } else {
    return false;
  }
  return true;
}

}  // namespace

std::vector<OptionField> option_fields(const topt::OptimizerOptions& options) {
  std::vector<OptionField> fields;
  visit_options(const_cast<topt::OptimizerOptions&>(options), [&](const char* name, auto& value) {
    fields.push_back({name, static_cast<double>(value), std::is_same_v<decltype(value), bool&>});
  });
  return fields;
}

void set_option_fields(topt::OptimizerOptions& options, const std::vector<OptionField>& fields) {
  const auto find = [&](const std::string& name) {
    for (const auto& field : fields) {
      if (field.name == name) return &field;
    }
    return static_cast<const OptionField*>(nullptr);
  };
  const auto present = option_fields(options);
  for (const auto& field : present) {
    const auto* given = find(field.name);
    TORCH_CHECK(given && given->is_flag == field.is_flag, "the optimizer's option '", field.name,
                "' is not among the given ones");
  }
  TORCH_CHECK(present.size() == fields.size(), fields.size(), " options were given, the optimizer has ",
              present.size());
  visit_options(options, [&](const char* name, auto& value) {
    value = static_cast<std::decay_t<decltype(value)>>(find(name)->value);
  });
}

std::string describe(const topt::OptimizerOptions& options) {
  std::ostringstream text;
  text << std::setprecision(17);
  const auto fields = option_fields(options);
  for (const auto& field : fields) text << ' ' << field.name << ' ' << field.value;
  if (fields.empty()) text << " options " << c10::demangle(typeid(options).name());
  return text.str();
}

namespace {

using Change = std::function<at::Tensor(const at::Tensor&)>;

// Calls visit(name, getter value, setter) for every tensor of a known state.
template <typename Visit>
bool visit_tensors(Kind kind, topt::OptimizerParamState& state, const Visit& visit) {
  const auto adam = [&](auto& s) {
    visit("exp_avg", s.exp_avg(), [&](at::Tensor t) { s.exp_avg(std::move(t)); });
    visit("exp_avg_sq", s.exp_avg_sq(), [&](at::Tensor t) { s.exp_avg_sq(std::move(t)); });
    visit("max_exp_avg_sq", s.max_exp_avg_sq(), [&](at::Tensor t) { s.max_exp_avg_sq(std::move(t)); });
  };
  switch (kind) {
    case Kind::kAdam:
      adam(static_cast<topt::AdamParamState&>(state));
      return true;
    case Kind::kAdamW:
      adam(static_cast<topt::AdamWParamState&>(state));
      return true;
    case Kind::kSgd: {
      auto& s = static_cast<topt::SGDParamState&>(state);
      visit("momentum_buffer", s.momentum_buffer(), [&](at::Tensor t) { s.momentum_buffer(std::move(t)); });
      return true;
    }
    case Kind::kRmsprop: {
      auto& s = static_cast<topt::RMSpropParamState&>(state);
      visit("square_avg", s.square_avg(), [&](at::Tensor t) { s.square_avg(std::move(t)); });
      visit("momentum_buffer", s.momentum_buffer(), [&](at::Tensor t) { s.momentum_buffer(std::move(t)); });
      visit("grad_avg", s.grad_avg(), [&](at::Tensor t) { s.grad_avg(std::move(t)); });
      return true;
    }
    case Kind::kAdagrad: {
      auto& s = static_cast<topt::AdagradParamState&>(state);
      visit("sum", s.sum(), [&](at::Tensor t) { s.sum(std::move(t)); });
      return true;
    }
    case Kind::kUnknown:
      return false;
  }
  return false;
}

// Calls visit(step&); false: the type counts no steps.
template <typename Visit>
bool visit_step(Kind kind, topt::OptimizerParamState& state, const Visit& visit) {
  switch (kind) {
    case Kind::kAdam:
      visit(static_cast<topt::AdamParamState&>(state).step());
      return true;
    case Kind::kAdamW:
      visit(static_cast<topt::AdamWParamState&>(state).step());
      return true;
    case Kind::kRmsprop:
      visit(static_cast<topt::RMSpropParamState&>(state).step());
      return true;
    case Kind::kAdagrad:
      visit(static_cast<topt::AdagradParamState&>(state).step());
      return true;
    default:
      return false;
  }
}

std::unique_ptr<topt::OptimizerParamState> empty_state(Kind kind) {
  switch (kind) {
    case Kind::kAdam:
      return std::make_unique<topt::AdamParamState>();
    case Kind::kAdamW:
      return std::make_unique<topt::AdamWParamState>();
    case Kind::kSgd:
      return std::make_unique<topt::SGDParamState>();
    case Kind::kRmsprop:
      return std::make_unique<topt::RMSpropParamState>();
    case Kind::kAdagrad:
      return std::make_unique<topt::AdagradParamState>();
    case Kind::kUnknown:
      break;
  }
  TORCH_CHECK(false, "the optimizer's state is of a type that is not known");
}

topt::OptimizerParamState& writable(const topt::OptimizerParamState& state) {
  return const_cast<topt::OptimizerParamState&>(state);  // for visitors that only look
}

}  // namespace

std::vector<StateField> state_fields(Kind kind, const topt::OptimizerParamState& state) {
  std::vector<StateField> fields;
  const bool known = visit_tensors(kind, writable(state), [&](const char* name, const at::Tensor& tensor, const auto&) {
    if (tensor.defined()) fields.push_back({name, tensor});
  });
  TORCH_CHECK(known, "the optimizer's state is of a type that is not known (", c10::demangle(typeid(state).name()),
              ")");
  return fields;
}

std::optional<int64_t> state_step(Kind kind, const topt::OptimizerParamState& state) {
  std::optional<int64_t> step;
  visit_step(kind, writable(state), [&](int64_t& value) { step = value; });
  return step;
}

bool has_state_field(Kind kind, const std::string& name) {
  if (kind == Kind::kUnknown) return false;
  const auto state = empty_state(kind);
  bool found = name == "step" && visit_step(kind, *state, [](int64_t&) {});
  visit_tensors(kind, *state, [&](const char* each, const at::Tensor&, const auto&) { found |= name == each; });
  return found;
}

std::unique_ptr<topt::OptimizerParamState> make_state(Kind kind, std::optional<int64_t> step,
                                                      const std::vector<StateField>& fields) {
  auto state = empty_state(kind);
  if (step) visit_step(kind, *state, [&](int64_t& value) { value = *step; });
  visit_tensors(kind, *state, [&](const char* name, const at::Tensor&, const auto& set) {
    for (const auto& field : fields) {
      if (field.name == name) set(field.tensor);
    }
  });
  return state;
}

std::string describe(Kind kind, const topt::OptimizerParamState* state) {
  if (!state) return {};
  std::string text = "step " + std::to_string(state_step(kind, *state).value_or(0));
  const bool known = visit_tensors(kind, const_cast<topt::OptimizerParamState&>(*state),
                                   [&](const char* name, const at::Tensor& tensor, const auto&) {
                                     if (tensor.defined()) text += std::string(" ") + name;
                                   });
  return known ? text : "unknown state";
}

void transform_tensors(Kind kind, topt::OptimizerParamState& state, const Change& change) {
  const bool known = visit_tensors(kind, state, [&](const char*, const at::Tensor& tensor, const auto& set) {
    if (tensor.defined()) set(change(tensor));
  });
  TORCH_CHECK(known, "trueshard: the optimizer has state of a type that can not be cut into shards (",
              c10::demangle(typeid(state).name()), "); call shard() before its first step");
}

}  // namespace trueshard::optim
