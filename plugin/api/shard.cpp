// SPDX-License-Identifier: BSD-3-Clause
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/nn/module.h>

#include <trueshard/sharded_optimizer.h>

#include "plugin/api/shard_listing.h"
#include "plugin/comm/torch_version.h"
#include "plugin/engine/gradient_hooks.h"
#include "plugin/engine/module_view.h"
#include "plugin/optim/session.h"

namespace trueshard {

namespace {

std::unique_ptr<ShardedOptimizer> make(const engine::ModuleView& view,
                                       std::unique_ptr<torch::optim::Optimizer> optimizer,
                                       const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                       const ShardOptions& options) {
  comm::require_compatible_torch();
  TORCH_CHECK(group, "trueshard shard: the process group is null; make it with trueshard::init_process_group()");
  return std::make_unique<ShardedOptimizer>(
      std::make_unique<optim::Session>(view, std::move(optimizer), group, options));
}

// Fused kernels of TorchScript read raw pointers, which no dispatch key sees.
void switch_fuser_off(const ShardOptions& options) {
  if (options.stage() == Stage::Zero3) torch::jit::setTensorExprFuserEnabled(false);
}

}  // namespace

std::unique_ptr<ShardedOptimizer> shard(torch::nn::Module& module, std::unique_ptr<torch::optim::Optimizer> optimizer,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                        const ShardOptions& options) {
  return make(engine::view_module(module, options.mp_policy()), std::move(optimizer), group, options);
}
std::unique_ptr<ShardedOptimizer> shard(torch::jit::Module& module, std::unique_ptr<torch::optim::Optimizer> optimizer,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                        const ShardOptions& options) {
  switch_fuser_off(options);
  return make(engine::view_module(module, options.mp_policy()), std::move(optimizer), group, options);
}
std::unique_ptr<ShardedOptimizer> shard_listing(const engine::ModuleListing& listing,
                                                std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                const ShardOptions& options) {
  switch_fuser_off(options);  // the module may hold scripted parts
  return make(engine::view_listing(listing, options.mp_policy()), std::move(optimizer), group, options);
}

void poison_moved_from(torch::optim::Optimizer& moved_from, const torch::optim::Optimizer& now) {
  moved_from.param_groups().clear();
  moved_from.state().clear();
  if (now.param_groups().empty() || !now.param_groups()[0].has_options()) return;
  auto parameter = at::empty({1});
  parameter.mutable_grad() = engine::make_placeholder(parameter,
                                                      "trueshard: this optimizer was moved into shard(); call step() "
                                                      "and zero_grad() on the ShardedOptimizer that shard() returned");
  moved_from.param_groups().emplace_back(std::vector<at::Tensor>{parameter}, now.param_groups()[0].options().clone());
}

}  // namespace trueshard
