// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/unit_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace trueshard::plan {
namespace {

std::vector<UnitSpec> model() {
  return {{"embed.weight", 100},
          {"blocks.0.a.weight", 30},
          {"blocks.0.b.weight", 30},
          {"blocks.1.a.weight", 30},
          {"blocks.1.b.weight", 30},
          {"gain", 4},
          {"bias", 4}};
}
std::vector<std::string> modules_of(const UnitPlan& plan) {
  std::vector<std::string> names;
  for (const auto& unit : plan.units) names.push_back(unit.module + ":" + std::to_string(unit.parameters.size()));
  std::sort(names.begin(), names.end());
  return names;
}
using Names = std::vector<std::string>;

TEST(UnitPlan, TakesTheLargestModulesBelowTheLimit) {
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{}, 1000})), Names({":7"}));
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{}, 120})), Names({":2", "blocks:4", "embed:1"}));
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{}, 60})), Names({":2", "blocks.0:2", "blocks.1:2", "embed:1"}));
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{}, 4})),
            Names({":1", ":1", "blocks.0.a:1", "blocks.0.b:1", "blocks.1.a:1", "blocks.1.b:1", "embed:1"}));
}

TEST(UnitPlan, NamedModulesAreUnitsWithWhatIsBelowThem) {
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{"blocks"}, 4})), Names({":1", ":1", "blocks:4", "embed:1"}));
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{"", "blocks.1"}, 4})), Names({":5", "blocks.1:2"}));
  EXPECT_EQ(modules_of(make_unit_plan(model(), {{"blocks.0.b"}, 1000})),
            Names({":2", "blocks.0.a:1", "blocks.0.b:1", "blocks.1:2", "embed:1"}));
}

TEST(UnitPlan, EveryParameterIsInExactlyOneUnit) {
  for (const int64_t limit : {1, 30, 50, 61, 130, 100000}) {
    const auto plan = make_unit_plan(model(), {{"blocks.1"}, limit});
    std::vector<int64_t> seen;
    for (size_t u = 0; u < plan.units.size(); ++u) {
      EXPECT_TRUE(std::is_sorted(plan.units[u].parameters.begin(), plan.units[u].parameters.end()));
      for (const auto p : plan.units[u].parameters) {
        seen.push_back(p);
        EXPECT_EQ(plan.unit_of[static_cast<size_t>(p)], static_cast<int64_t>(u));
      }
    }
    std::sort(seen.begin(), seen.end());
    std::vector<int64_t> all(model().size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
}

TEST(UnitPlan, RefusesUnknownModulesAndLimitsBelowOne) {
  EXPECT_THROW(make_unit_plan(model(), {{"block"}, 4}), std::invalid_argument);
  EXPECT_THROW(make_unit_plan(model(), {{}, 0}), std::invalid_argument);
  EXPECT_TRUE(make_unit_plan({}, {{}, 1}).units.empty());
}

}  // namespace
}  // namespace trueshard::plan
