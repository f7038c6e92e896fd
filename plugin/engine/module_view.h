// SPDX-License-Identifier: BSD-3-Clause
// Role: a module as the engine sees it: its parameters and buffers by name, each tensor once, and which of them stay in
// full precision. Order: that of named_parameters(). A tensor registered under several names appears once, with all
// names. Errors: c10::Error for parameters that cannot be sharded (not dense, sharing one storage, not floating point),
// naming them.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include <trueshard/shard_options.h>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace trueshard::engine {

struct NamedTensor {
  std::string name;
  std::vector<std::string> other_names;
  at::Tensor tensor;
  bool full_precision = false;  // a 16-bit policy leaves it alone
};

struct ModuleView {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  std::string error;  // about the policy's module names; told to all ranks before it is thrown
};

// What a module registers, in its own order and with all names; a tensor may appear several times.
struct ModuleListing {
  std::vector<std::pair<std::string, at::Tensor>> parameters, buffers;
  std::vector<std::string> modules;       // names of submodules; "" is the module itself and need not be there
  std::vector<std::string> norm_modules;  // those whose own parameters keep their dtype under a 16-bit policy
};

ModuleView view_listing(const ModuleListing& listing, const MixedPrecisionPolicy& policy);
ModuleView view_module(torch::nn::Module& module, const MixedPrecisionPolicy& policy);
ModuleView view_module(torch::jit::Module& module, const MixedPrecisionPolicy& policy);
// Throws when a parameter cannot be put into flat memory, saying which and what to do.
void check_shardable(const ModuleView& view);
// Throws when ShardOptions.units names what the module does not have.
void check_units(const ModuleView& view, const ShardOptions& options);
// The name by which a parameter is given to a unit: the first of its names that lies below a named unit, else the
// first.
std::string name_for_unit(const std::string& name, const std::vector<std::string>& other_names,
                          const ShardOptions& options);

}  // namespace trueshard::engine
