// SPDX-License-Identifier: BSD-3-Clause
// What the operators give without data: shapes and dtypes, for torch.export, torch.compile and fake tensors. Group
// sizes come from the registry of groups; nothing is communicated.
#include <ATen/Functions.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "registration/operator_checks.h"

namespace trueshard::registration {
namespace {

at::Tensor sum_leaves_meta(at::TensorList leaves, double divisor, std::optional<c10::ScalarType> dtype) {
  const c10::ScalarType result = check_leaves(leaves, divisor, dtype);
  return at::empty_symint(leaves[0].sym_sizes(), leaves[0].options().dtype(result));
}

at::Tensor resized_rows(const at::Tensor& input, const c10::SymInt& rows, c10::ScalarType dtype) {
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  sizes[0] = rows;
  return at::empty_symint(sizes, input.options().dtype(dtype));
}

at::Tensor reduce_scatter_meta(const at::Tensor& input, const std::string& group_name, const std::string& op,
                               std::optional<c10::ScalarType> dtype) {
  check_reduction(op);
  const int64_t ranks = c10d::resolve_process_group(group_name)->getSize();
  TORCH_CHECK(input.dim() >= 1, "trueshard::reduce_scatter: the input is a single number, expected rows");
  return resized_rows(input, input.sym_size(0) / ranks, dtype.value_or(input.scalar_type()));
}

at::Tensor all_gather_meta(const at::Tensor& input, const std::string& group_name) {
  const int64_t ranks = c10d::resolve_process_group(group_name)->getSize();
  TORCH_CHECK(input.dim() >= 1, "trueshard::all_gather: the input is a single number, expected rows");
  return resized_rows(input, input.sym_size(0) * ranks, input.scalar_type());
}

void unscale_and_check_meta(const at::Tensor& gradient, const at::Tensor&, const at::Tensor&) {
  check_gradients("unscale_and_check_", {gradient});
}

void agree_meta(const at::Tensor&, const std::string&) {}

at::Tensor get_total_norm_meta(at::TensorList gradients, at::TensorList, const std::string&, double norm_type, bool) {
  check_gradients("get_total_norm", gradients);
  check_norm_type(norm_type);
  return at::empty({}, at::TensorOptions().dtype(at::kDouble).device(at::kMeta));
}

void clip_grads_with_norm_meta(const at::Tensor& gradient, double max_norm, const at::Tensor&) {
  check_gradients("clip_grads_with_norm_", {gradient});
  check_max_norm(max_norm);
}

void sgd_meta(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, double, double, double,
              bool, bool, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&) {}

void adam_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
               const std::optional<at::Tensor>&, const at::Tensor&, double, double, double, double, double,
               const std::optional<at::Tensor>&, const std::optional<at::Tensor>&) {}

}  // namespace

TORCH_LIBRARY_IMPL(trueshard, Meta, library) {
  library.impl("sum_leaves", &sum_leaves_meta);
  library.impl("reduce_scatter", &reduce_scatter_meta);
  library.impl("all_gather", &all_gather_meta);
  library.impl("unscale_and_check_", &unscale_and_check_meta);
  library.impl("agree_", &agree_meta);
  library.impl("get_total_norm", &get_total_norm_meta);
  library.impl("clip_grads_with_norm_", &clip_grads_with_norm_meta);
  library.impl("sgd_", &sgd_meta);
  library.impl("adam_", &adam_meta);
  library.impl("adamw_", &adam_meta);
}

}  // namespace trueshard::registration
