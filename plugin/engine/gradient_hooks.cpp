// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/gradient_hooks.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

namespace trueshard::engine {

using torch::autograd::variable_list;

struct GradientHooks::PreHook : torch::autograd::FunctionPreHook {
  std::shared_ptr<Target> target;
  int64_t parameter;
  PreHook(std::shared_ptr<Target> to, int64_t index) : target(std::move(to)), parameter(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (target->sink) target->sink->before_accumulate(parameter);
    return gradients;
  }
};
struct GradientHooks::PostHook : torch::autograd::FunctionPostHook {
  std::shared_ptr<Target> target;
  int64_t parameter;
  PostHook(std::shared_ptr<Target> to, int64_t index) : target(std::move(to)), parameter(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (target->sink) target->sink->after_accumulate(parameter);
    return outputs;
  }
};
struct GradientHooks::Installed {
  c10::intrusive_ptr<torch::autograd::Node> accumulator;
};

void GradientHooks::install(int64_t parameter, const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return;
  if (installed_.size() <= static_cast<size_t>(parameter)) installed_.resize(parameter + 1);
  auto accumulator = torch::autograd::impl::grad_accumulator(tensor);
  auto& slot = installed_[parameter];
  if (slot && slot->accumulator == accumulator) return;
  accumulator->add_pre_hook(std::make_unique<PreHook>(target_, parameter));
  accumulator->add_post_hook(std::make_unique<PostHook>(target_, parameter));
  slot = std::make_shared<Installed>(Installed{std::move(accumulator)});
}

at::Tensor make_placeholder(const at::Tensor& like, const std::string& text) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(like.numel()) * like.element_size(),
      at::DataPtr(nullptr, like.device()), /*allocator=*/nullptr, /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

}  // namespace trueshard::engine
