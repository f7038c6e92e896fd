// SPDX-License-Identifier: BSD-3-Clause
// Role: random parameter lists for the plan's properties.
// Invariants: sizes are drawn around the alignments (16, 64, 256), where off-by-one errors live, and include 0.
// Shapes: at most 9 parameters of a few thousand elements. Threads: none. Errors: none.
#pragma once
#include <rapidcheck.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plugin/plan/shard_plan.h"

namespace trueshard::plan {

inline rc::Gen<int64_t> random_numel() {
  return rc::gen::oneOf(rc::gen::element<int64_t>(0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513),
                        rc::gen::resize(100, rc::gen::inRange<int64_t>(0, 200)),
                        rc::gen::resize(100, rc::gen::inRange<int64_t>(0, 6000)));
}

inline std::vector<ParameterSpec> random_parameters(int least) {
  const int count = *rc::gen::resize(100, rc::gen::inRange(least, 10));
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < count; ++i) {
    ParameterSpec spec;
    spec.name = "p";
    spec.name += std::to_string(i);
    spec.numel = *random_numel();
    spec.compute_itemsize = *rc::gen::element<int64_t>(1, 2, 4, 8);
    spec.master_itemsize = *rc::gen::weightedElement<int64_t>({{4, 4}, {1, 8}});
    parameters.push_back(spec);
  }
  return parameters;
}

inline int64_t compute_bytes(const std::vector<ParameterSpec>& parameters) {
  int64_t bytes = 0;
  for (const ParameterSpec& spec : parameters) bytes += spec.numel * spec.compute_itemsize;
  return bytes;
}

// From one byte to more than the whole list.
inline int64_t random_bucket_bytes(const std::vector<ParameterSpec>& parameters) {
  return *rc::gen::resize(100, rc::gen::inRange<int64_t>(1, compute_bytes(parameters) + 2));
}

}  // namespace trueshard::plan
