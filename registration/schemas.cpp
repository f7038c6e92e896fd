// SPDX-License-Identifier: BSD-3-Clause
// Every operator's schema. A name that ends in _ writes to what is marked (a!), (b!), ...; nothing else is written.
// Kernels: sum_operators.cpp, group_operators.cpp, gradient_operators.cpp, step_operators.cpp; shapes:
// meta_operators.cpp.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace trueshard::registration {
namespace {

// What is written is a tensor of its own in the schema, never a list: TorchScript's passes drop or reorder operators
// that write to the elements of a list (they do so to torch._foreach_add_ too).
constexpr const char* kSchemas[] = {
    // The canonical tree over the leaves (docs/numerics.md section 1), then one division, then one rounding.
    // dtype: that of the result; by default what the sum is kept in, fp32 or fp64.
    "sum_leaves(Tensor[] leaves, *, float divisor=1.0, ScalarType? dtype=None) -> Tensor",

    // gradient *= inverse_scale; found_inf becomes 1 where an element was inf or NaN before, else it stays.
    "unscale_and_check_(Tensor(a!) gradient, Tensor inverse_scale, Tensor(b!) found_inf) -> ()",
    // found_inf becomes 1 where it is not 0 on any rank of the group.
    "agree_(Tensor(a!) found_inf, str group_name) -> ()",
    // gradient *= max_norm / (total_norm + 1e-6) where that is below 1; nothing where total_norm is not finite.
    "clip_grads_with_norm_(Tensor(a!) gradient, float max_norm, Tensor total_norm) -> ()",

    // The steps of torch.optim. grad_scale: the gradient is divided by it. found_inf: where it is not 0 nothing is
    // changed, the step count included.
    "sgd_(Tensor(a!) parameter, Tensor gradient, Tensor(b!)? momentum_buffer, *, float lr, float momentum=0.0, "
    "float dampening=0.0, float weight_decay=0.0, bool nesterov=False, bool first_step=False, Tensor? grad_scale=None, "
    "Tensor? found_inf=None) -> ()",
    "adam_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!)? max_exp_avg_sq, Tensor(e!) step, *, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
    "float weight_decay=0.0, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()",
    "adamw_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!)? max_exp_avg_sq, Tensor(e!) step, *, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
    "float weight_decay=0.01, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()",
};

// Other ranks take part: neither dropped nor merged by TorchScript's passes, whatever becomes of the result.
constexpr const char* kCollectiveSchemas[] = {
    // Over the ranks of a group of this backend, in rows (dimension 0). op: 'sum' or 'avg'. dtype: by default the
    // input's.
    "reduce_scatter(Tensor input, str group_name, *, str op='sum', ScalarType? dtype=None) -> Tensor",
    "all_gather(Tensor input, str group_name) -> Tensor",
    // One norm, the same bits on all ranks, over the shards of all and over what every rank has whole (counted once).
    "get_total_norm(Tensor[] gradients, Tensor[] replicated, str group_name, *, float norm_type=2.0, "
    "bool error_if_nonfinite=False) -> Tensor",
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(trueshard, library) {
  for (const char* schema : kSchemas) library.def(schema);
  for (const char* schema : kCollectiveSchemas)
    library.def(torch::schema(schema, c10::AliasAnalysisKind::CONSERVATIVE));
}

// A backward through one of them is an error, never a silent zero.
TORCH_LIBRARY_IMPL(trueshard, Autograd, library) {
  for (const char* name : {"sum_leaves", "reduce_scatter", "all_gather", "unscale_and_check_", "agree_",
                           "get_total_norm", "clip_grads_with_norm_", "sgd_", "adam_", "adamw_"})
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace trueshard::registration
