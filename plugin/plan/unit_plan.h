// SPDX-License-Identifier: BSD-3-Clause
// Role: units: which parameters are made whole together (ZeRO-3). They follow the module tree, which is read off the
// parameters' dotted names. Invariants: I1 every parameter is in exactly one unit. I2 a unit's parameters are in list
// order. I3 the bits of no result depend on it.
// Shapes: bytes of the compute dtype. Threads: immutable. Errors: std::invalid_argument for unknown module names and
// numbers below 1.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace trueshard::plan {

struct UnitSpec {
  std::string name;   // "encoder.0.weight"
  int64_t bytes = 0;  // whole, in the compute dtype
};

struct Unit {
  std::string module;  // "encoder.0"; "" is the root
  std::vector<int64_t> parameters;
  int64_t bytes = 0;
};

struct UnitPlan {
  std::vector<Unit> units;
  std::vector<int64_t> unit_of;  // parameter -> unit
};

struct UnitRequest {
  std::vector<std::string> modules;  // each of them is a unit, with everything below it that is not named as well
  int64_t unit_bytes = 0;            // elsewhere: the largest modules of at most this many bytes
};

// A module that is too large gives its children units of their own; its own parameters then form units of up to
// unit_bytes in list order (a larger parameter has one of its own).
UnitPlan make_unit_plan(const std::vector<UnitSpec>& parameters, const UnitRequest& request);

}  // namespace trueshard::plan
