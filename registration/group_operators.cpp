// SPDX-License-Identifier: BSD-3-Clause
#include "registration/group_operators.h"

#include <ATen/Functions.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "plugin/comm/backend.h"
#include "registration/sum_operators.h"

namespace trueshard::registration {

c10::intrusive_ptr<c10d::ProcessGroup> group_named(const char* op, const std::string& name) {
  auto group = c10d::resolve_process_group(name);
  try {
    comm::transport_of(*group);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "trueshard::", op, ": group '", name, "': ", error.what_without_backtrace());
  }
  return group;
}

at::Tensor gather_numbers(c10d::ProcessGroup& group, const at::Tensor& numbers) {
  at::Tensor input = numbers.contiguous();
  at::Tensor output = at::empty({group.getSize(), input.numel()}, input.options());
  group.all_gather_single(output, input)->wait();
  return output;
}

namespace {

at::Tensor reduce_scatter(const at::Tensor& input, const std::string& group_name, const std::string& op,
                          std::optional<c10::ScalarType> dtype) {
  const GroupReduction reduction = check_reduction(op);
  const auto group = group_named("reduce_scatter", group_name);
  const int64_t ranks = group->getSize(), rows = check_rows("reduce_scatter", input, ranks);
  // Every rank's leaves of this rank's part, then the sum: bytes travel in the leaves' own dtype.
  at::Tensor source = input.contiguous();
  at::Tensor leaves = at::empty_like(source);
  std::vector<int64_t> even;
  group->all_to_all_single(leaves, source, even, even)->wait();
  std::vector<at::Tensor> parts;
  for (int64_t r = 0; r < ranks; ++r) parts.push_back(leaves.narrow(0, r * rows, rows));
  const double divisor = reduction == GroupReduction::kAverage ? static_cast<double>(ranks) : 1.0;
  return sum_leaves(parts, divisor, dtype.value_or(input.scalar_type()));
}

at::Tensor all_gather(const at::Tensor& input, const std::string& group_name) {
  const auto group = group_named("all_gather", group_name);
  check_rows("all_gather", input, 1);
  at::Tensor source = input.contiguous();
  std::vector<int64_t> sizes = source.sizes().vec();
  sizes[0] *= group->getSize();
  at::Tensor output = at::empty(sizes, source.options());
  group->all_gather_single(output, source)->wait();
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(trueshard, CPU, library) {
  library.impl("reduce_scatter", &reduce_scatter);
  library.impl("all_gather", &all_gather);
}

}  // namespace trueshard::registration
