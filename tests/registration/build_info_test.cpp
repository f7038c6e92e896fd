// SPDX-License-Identifier: BSD-3-Clause
// The operator by which a loaded library is seen, and the check that a torch of another minor version is refused.
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plugin/comm/torch_version.h"
#include "registration/build_info.h"

namespace trueshard {
namespace {

using comm::TorchVersion;
using testing::HasSubstr;
using testing::StartsWith;

TEST(BuildInfo, IsAnOperatorThatTheDispatcherFinds) {
  const auto op = c10::Dispatcher::singleton().findSchema({"trueshard::build_info", ""});
  ASSERT_TRUE(op.has_value());
  std::vector<c10::IValue> stack;
  op->callBoxed(stack);
  ASSERT_EQ(stack.size(), 1u);
  EXPECT_EQ(stack[0].toStringRef(), registration::build_info());
}

TEST(BuildInfo, NamesTheLibraryAndBothTorchVersions) {
  const std::string text = registration::build_info();
  EXPECT_THAT(text, StartsWith("trueshard " TRUESHARD_EXPECTED_VERSION ", "));
  EXPECT_THAT(text, HasSubstr("compiled for torch " + comm::to_string(comm::compiled_torch())));
  EXPECT_THAT(text, HasSubstr("running torch " + comm::to_string(comm::running_torch())));
}

TEST(TorchVersion, I1_TheRunningTorchOfThisTestIsTheOneItWasCompiledFor) {
  const TorchVersion compiled = comm::compiled_torch();
  const TorchVersion running = comm::running_torch();
  EXPECT_GE(compiled.major, 2);
  EXPECT_EQ(compiled.major, running.major);
  EXPECT_EQ(compiled.minor, running.minor);
  EXPECT_NO_THROW(comm::require_compatible_torch());
}

TEST(TorchVersion, I1_AnotherPatchReleaseIsCompatible) {
  EXPECT_EQ(comm::torch_mismatch({2, 13, 0}, {2, 13, 1}), "");
  EXPECT_EQ(comm::torch_mismatch({2, 13, 4}, {2, 13, 0}), "");
}

TEST(TorchVersion, I1_AnotherMinorOrMajorIsRefusedWithBothVersionsAndAWayOut) {
  for (const TorchVersion running : {TorchVersion{2, 12, 0}, TorchVersion{2, 14, 0}, TorchVersion{3, 13, 0}}) {
    const std::string text = comm::torch_mismatch({2, 13, 0}, running);
    EXPECT_THAT(text, HasSubstr("compiled for torch 2.13.0"));
    EXPECT_THAT(text, HasSubstr("runs torch " + comm::to_string(running)));
    EXPECT_THAT(text, HasSubstr("rebuild trueshard against that torch, or load torch 2.13"));
  }
}

}  // namespace
}  // namespace trueshard
