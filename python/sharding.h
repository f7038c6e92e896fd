// SPDX-License-Identifier: BSD-3-Clause
// Role: binds shard(), ShardedOptimizer, its guards, the scaler and clip_grad_norm_ for trueshard/sharding.py.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace trueshard::python {

void bind_sharding(pybind11::module_& module);

}  // namespace trueshard::python
