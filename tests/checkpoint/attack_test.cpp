// SPDX-License-Identifier: BSD-3-Clause
// The files under tests/attacks: each is refused with the text that stands beside it, without a crash and without
// memory beyond a small multiple of its size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/safetensors.h"
#include "tests/checkpoint/files.h"

namespace trueshard::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using trueshard::testing::read_bytes;
using trueshard::testing::safetensors_bytes;
using trueshard::testing::TemporaryFolder;
using trueshard::testing::write_bytes;

std::string refusal_of(const std::string& path) {
  try {
    if (path.ends_with(".json")) {
      parse_manifest(read_bytes(path), "manifest");
    } else {
      read_header(open_regular(path));
    }
  } catch (const FormatError& error) {
    return error.what();
  }
  return "not refused";
}

std::vector<std::string> attack_files() {
  std::vector<std::string> names;
  for (const auto& each : fs::directory_iterator(TRUESHARD_ATTACKS)) {
    const auto extension = each.path().extension();
    if (extension == ".safetensors" || extension == ".json") names.push_back(each.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class Attack : public ::testing::TestWithParam<std::string> {};

TEST_P(Attack, IsRefusedForTheRightReason) {
  const std::string path = std::string(TRUESHARD_ATTACKS) + "/" + GetParam();
  auto expected = read_bytes(fs::path(path).replace_extension(".refusal").string());
  while (!expected.empty() && expected.back() == '\n') expected.pop_back();
  ASSERT_FALSE(expected.empty());
  EXPECT_THAT(refusal_of(path), HasSubstr(expected));
}

INSTANTIATE_TEST_SUITE_P(Files, Attack, ::testing::ValuesIn(attack_files()), [](const auto& param) {
  std::string name = fs::path(param.param).stem().string();
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
});

TEST(AttackFiles, AreThere) { EXPECT_GE(attack_files().size(), 40u); }

// Peak memory of this process in bytes.
int64_t peak_memory() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

TEST(AttackFiles, AHugeClaimedHeaderAllocatesNothing) {
  const TemporaryFolder folder;
  const int64_t before = peak_memory();
  std::string bytes(8, '\0');
  for (const uint64_t length : {uint64_t{99'999'999}, uint64_t{100'000'001}, uint64_t{1} << 40, ~uint64_t{0}}) {
    std::memcpy(bytes.data(), &length, 8);
    write_bytes(folder / "f", bytes + "{}");
    EXPECT_THAT(refusal_of(folder / "f"), HasSubstr("the header says it is"));
  }
  // A file with a hole of that size: the claim is true, the header is not one.
  const uint64_t length = 90'000'000;
  std::memcpy(bytes.data(), &length, 8);
  write_bytes(folder / "f", bytes);
  fs::resize_file(folder / "f", 8 + length);
  EXPECT_THAT(refusal_of(folder / "f"), HasSubstr("does not start with '{'"));
  EXPECT_LT(peak_memory() - before, int64_t{200} << 20);
}

TEST(AttackFiles, DeepNestingIsRefusedWithoutRecursion) {
  const TemporaryFolder folder;
  write_bytes(folder / "f", safetensors_bytes("{\"a\":" + std::string(10'000'000, '['), ""));
  EXPECT_THAT(refusal_of(folder / "f"), HasSubstr("nested more than 3 deep"));
}

TEST(AttackFiles, APipeOrAFolderInAFilesPlaceIsRefusedAndNotWaitedFor) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto open = [&](const std::string& name) {
    try {
      Folder::open(folder.path()).open_file(name);
    } catch (const FormatError& error) {
      return std::string(error.what());
    }
    return std::string("opened");
  };
  EXPECT_THAT(open("pipe"), HasSubstr("is not a regular file"));
  for (const char* name : {"../f", "a/b", "..", ".", "", "/etc/passwd"})
    EXPECT_THAT(open(name), HasSubstr("is not the name of a file inside the folder")) << name;
}

}  // namespace
}  // namespace trueshard::checkpoint
