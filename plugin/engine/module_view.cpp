// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/module_view.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <unordered_map>
#include <unordered_set>

#include "plugin/engine/dtypes.h"
#include "plugin/plan/unit_plan.h"

namespace trueshard::engine {

namespace {

void add(std::vector<NamedTensor>& list, std::unordered_map<c10::TensorImpl*, size_t>& seen, const std::string& name,
         const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto [at, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), list.size());
  if (is_new) {
    list.push_back({name, {}, tensor, false});
  } else {
    list[at->second].other_names.push_back(name);
  }
}

// Libtorch's CPU batch norm refuses 16-bit weights with fp32 statistics, and 16-bit statistics lose small updates.
bool keeps_full_precision(const torch::nn::Module& module) {
  namespace nn = torch::nn;
  return dynamic_cast<const nn::BatchNorm1dImpl*>(&module) || dynamic_cast<const nn::BatchNorm2dImpl*>(&module) ||
         dynamic_cast<const nn::BatchNorm3dImpl*>(&module) || dynamic_cast<const nn::InstanceNorm1dImpl*>(&module) ||
         dynamic_cast<const nn::InstanceNorm2dImpl*>(&module) || dynamic_cast<const nn::InstanceNorm3dImpl*>(&module);
}
bool keeps_full_precision(const torch::jit::Module& module) {
  const auto name = module.type()->name();
  return name && (name->name().find("BatchNorm") != std::string::npos ||
                  name->name().find("InstanceNorm") != std::string::npos);
}

bool is_below(const std::string& name, const std::string& module) {
  return module.empty() || name == module ||
         (name.size() > module.size() && name.compare(0, module.size(), module) == 0 && name[module.size()] == '.');
}

// `norm_modules`: names of modules that always keep their dtype; only their own parameters count, not their children's.
void mark_full_precision(ModuleView& view, const std::vector<std::string>& norm_modules,
                         const std::unordered_set<std::string>& module_names, const MixedPrecisionPolicy& policy) {
  for (const auto& named : policy.full_precision_modules()) {
    if (module_names.count(named) > 0) continue;
    view.error = "MixedPrecisionPolicy.full_precision_modules names '" + named +
                 "', but the module has no submodule of that name; use a name from named_modules()";
  }
  for (auto& parameter : view.parameters) {
    auto names = parameter.other_names;
    names.push_back(parameter.name);
    for (const auto& name : names) {
      const auto dot = name.rfind('.');
      const std::string owner = dot == std::string::npos ? "" : name.substr(0, dot);
      for (const auto& norm : norm_modules) parameter.full_precision |= owner == norm;
      for (const auto& named : policy.full_precision_modules()) parameter.full_precision |= is_below(owner, named);
    }
  }
}

}  // namespace

ModuleView view_listing(const ModuleListing& listing, const MixedPrecisionPolicy& policy) {
  ModuleView view;
  std::unordered_map<c10::TensorImpl*, size_t> seen;
  for (const auto& [name, tensor] : listing.parameters) add(view.parameters, seen, name, tensor);
  seen.clear();
  for (const auto& [name, tensor] : listing.buffers) add(view.buffers, seen, name, tensor);
  std::unordered_set<std::string> names(listing.modules.begin(), listing.modules.end());
  names.insert("");
  mark_full_precision(view, listing.norm_modules, names, policy);
  return view;
}

ModuleView view_module(torch::nn::Module& module, const MixedPrecisionPolicy& policy) {
  ModuleListing listing;
  for (const auto& item : module.named_parameters()) listing.parameters.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) listing.buffers.emplace_back(item.key(), item.value());
  if (keeps_full_precision(module)) listing.norm_modules.emplace_back();
  // named_modules() needs a module owned by a shared_ptr to include itself; its children are enough here.
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    listing.modules.push_back(item.key());
    if (keeps_full_precision(*item.value())) listing.norm_modules.push_back(item.key());
  }
  return view_listing(listing, policy);
}

ModuleView view_module(torch::jit::Module& module, const MixedPrecisionPolicy& policy) {
  ModuleListing listing;
  for (const auto& item : module.named_parameters()) listing.parameters.emplace_back(item.name, item.value);
  for (const auto& item : module.named_buffers()) listing.buffers.emplace_back(item.name, item.value);
  for (const auto& item : module.named_modules()) {
    listing.modules.push_back(item.name);
    if (keeps_full_precision(item.value)) listing.norm_modules.push_back(item.name);
  }
  return view_listing(listing, policy);
}

std::string name_for_unit(const std::string& name, const std::vector<std::string>& other_names,
                          const ShardOptions& options) {
  const auto is_named = [&](const std::string& candidate) {
    for (const auto& unit : options.units()) {
      if (!unit.empty() && candidate.rfind(unit + ".", 0) == 0) return true;
    }
    return false;
  };
  if (is_named(name)) return name;
  for (const auto& other : other_names) {
    if (is_named(other)) return other;
  }
  return name;
}

void check_units(const ModuleView& view, const ShardOptions& options) {
  std::vector<plan::UnitSpec> specs;
  for (const auto& p : view.parameters)
    specs.push_back({name_for_unit(p.name, p.other_names, options), static_cast<int64_t>(p.tensor.nbytes())});
  plan::make_unit_plan(specs, {options.units(), options.unit_bytes()});
}

void check_shardable(const ModuleView& view) {
  std::unordered_map<c10::StorageImpl*, std::string> owners;
  for (const auto& [name, other_names, tensor, full_precision] : view.parameters) {
    TORCH_CHECK(tensor.device().is_cpu(), "parameter '", name, "' is on ", tensor.device(),
                "; this version shards CPU parameters: call module.to(torch::kCPU) first");
    TORCH_CHECK(tensor.layout() == c10::kStrided && tensor.is_non_overlapping_and_dense(), "parameter '", name,
                "' is not dense in memory; replace it by a contiguous copy (set_data(p.contiguous())) first");
    TORCH_CHECK(is_reducible(tensor.scalar_type()), "parameter '", name, "' is ", c10::toString(tensor.scalar_type()),
                "; expected float32, float64, bfloat16 or float16 (keep others as buffers)");
    TORCH_CHECK(tensor.is_leaf(), "parameter '", name,
                "' is not a leaf of the autograd graph; register a detached tensor");
    if (tensor.numel() == 0) continue;
    TORCH_CHECK(tensor.storage_offset() == 0 &&
                    static_cast<int64_t>(tensor.storage().nbytes()) <= tensor.numel() * tensor.element_size() + 63,
                "parameter '", name,
                "' is a part of a larger storage; give it a storage of its own (set_data(p.clone())) first");
    const auto [at, is_new] = owners.emplace(tensor.storage().unsafeGetStorageImpl(), name);
    TORCH_CHECK(is_new, "parameters '", at->second, "' and '", name,
                "' share one storage but are different tensors; register one tensor under both names, or give each its "
                "own storage");
  }
}

}  // namespace trueshard::engine
