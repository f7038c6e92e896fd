// SPDX-License-Identifier: BSD-3-Clause
// Role: groups by name, as operators take them: the name is what c10d's registry knows the group by
// (`dist.group.WORLD.group_name`, ProcessGroup::getGroupName()). Threads: collective where marked.
// Errors: c10::Error for an unknown name or another backend's group.
#pragma once
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace trueshard::registration {

c10::intrusive_ptr<c10d::ProcessGroup> group_named(const char* op, const std::string& name);
// Collective: [ranks, n] from n numbers of every rank.
at::Tensor gather_numbers(c10d::ProcessGroup& group, const at::Tensor& numbers);

}  // namespace trueshard::registration
