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

struct Text {
  std::ostringstream out;
  Text() { out << std::setprecision(17); }
  template <typename Value>
  Text& field(const char* name, const Value& value) {
    out << ' ' << name << ' ' << value;
    return *this;
  }
};

template <typename Options>
bool adam_like(const topt::OptimizerOptions& options, Text& text) {
  const auto* o = dynamic_cast<const Options*>(&options);
  if (!o) return false;
  text.field("lr", o->lr())
      .field("beta1", std::get<0>(o->betas()))
      .field("beta2", std::get<1>(o->betas()))
      .field("eps", o->eps());
  text.field("weight_decay", o->weight_decay()).field("amsgrad", o->amsgrad());
  return true;
}

}  // namespace

std::string describe(const topt::OptimizerOptions& options) {
  Text text;
  if (adam_like<topt::AdamOptions>(options, text) || adam_like<topt::AdamWOptions>(options, text))
    return text.out.str();
  if (const auto* sgd = dynamic_cast<const topt::SGDOptions*>(&options)) {
    text.field("lr", sgd->lr()).field("momentum", sgd->momentum()).field("dampening", sgd->dampening());
    text.field("weight_decay", sgd->weight_decay()).field("nesterov", sgd->nesterov());
  } else if (const auto* rms = dynamic_cast<const topt::RMSpropOptions*>(&options)) {
    text.field("lr", rms->lr())
        .field("alpha", rms->alpha())
        .field("eps", rms->eps())
        .field("weight_decay", rms->weight_decay());
    text.field("momentum", rms->momentum()).field("centered", rms->centered());
  } else if (const auto* ada = dynamic_cast<const topt::AdagradOptions*>(&options)) {
    text.field("lr", ada->lr())
        .field("lr_decay", ada->lr_decay())
        .field("weight_decay", ada->weight_decay())
        .field("eps", ada->eps());
    text.field("initial_accumulator_value", ada->initial_accumulator_value());
  } else {
    text.field("options", c10::demangle(typeid(options).name()));
  }
  return text.out.str();
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

int64_t step_of(Kind kind, const topt::OptimizerParamState& state) {
  switch (kind) {
    case Kind::kAdam:
      return static_cast<const topt::AdamParamState&>(state).step();
    case Kind::kAdamW:
      return static_cast<const topt::AdamWParamState&>(state).step();
    case Kind::kRmsprop:
      return static_cast<const topt::RMSpropParamState&>(state).step();
    case Kind::kAdagrad:
      return static_cast<const topt::AdagradParamState&>(state).step();
    default:
      return 0;
  }
}

}  // namespace

std::string describe(Kind kind, const topt::OptimizerParamState* state) {
  if (!state) return {};
  std::string text = "step " + std::to_string(step_of(kind, *state));
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
