// SPDX-License-Identifier: BSD-3-Clause
// The format without torch: checksums, headers, manifest, and the act that makes a save visible.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/safetensors.h"
#include "plugin/checkpoint/staged_folder.h"
#include "tests/checkpoint/files.h"

namespace trueshard::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using trueshard::testing::read_bytes;
using trueshard::testing::TemporaryFolder;
using trueshard::testing::write_bytes;

std::string random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const FormatError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Crc32c, HasThePublishedCheckValues) {
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0').data(), 32), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43u);
  EXPECT_EQ(crc32c("", 0), 0u);
}

TEST(Crc32c, IsTheSameWithAndWithoutSpecialInstructionsAndInPieces) {
  const auto bytes = random_bytes(100'003, 1);
  for (const size_t count :
       {size_t{1}, size_t{7}, size_t{8}, size_t{12'287}, size_t{12'288}, size_t{50'000}, bytes.size()}) {
    const uint32_t whole = crc32c(bytes.data(), count);
    EXPECT_EQ(whole, crc32c_portable(bytes.data(), count)) << count;
    const size_t cut = count / 3;
    const uint32_t first = crc32c(bytes.data(), cut), second = crc32c(bytes.data() + cut, count - cut);
    EXPECT_EQ(whole, crc32c(bytes.data() + cut, count - cut, first));
    EXPECT_EQ(whole, crc32c_combine(first, second, count - cut));
  }
}

TEST(Crc32c, SharesOfPartsGiveTheSumOfTheWholeInAnyOrder) {
  const auto bytes = random_bytes(70'001, 2);
  const size_t cuts[] = {0, 0, 4096, 4097, 65'000, bytes.size(), bytes.size()};
  uint32_t shares = 0;
  for (size_t i = std::size(cuts) - 1; i > 0; --i) {
    const size_t count = cuts[i] - cuts[i - 1];
    shares ^= crc32c_share(crc32c(bytes.data() + cuts[i - 1], count), count, bytes.size() - cuts[i]);
  }
  EXPECT_EQ(crc32c_of_shares(shares, bytes.size()), crc32c(bytes.data(), bytes.size()));
}

TEST(Safetensors, AHeaderComesBackAsItWasPlanned) {
  const auto file = plan_file({{"b", Dtype::kBF16, {3}},
                               {"a \"quoted\" \xc3\xa9", Dtype::kF32, {2, 3}},
                               {"none", Dtype::kF32, {0, 5}},
                               {"scalar", Dtype::kI64, {}}},
                              {{"format", "pt"}});
  EXPECT_EQ(file.bytes.size() % 8, 0u);
  const auto header = parse_header(std::string_view(file.bytes).substr(8), file.header.file_bytes, "f");
  ASSERT_EQ(header.tensors.size(), 4u);
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(header.find("scalar")->bytes(), 8);
  EXPECT_EQ(header.find("scalar")->begin, 0) << "larger elements come first, so that all are aligned";
  EXPECT_EQ(header.find("none")->bytes(), 0);
  EXPECT_EQ(header.find("a \"quoted\" \xc3\xa9")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header.find("b")->end, header.file_bytes - header.data_offset);
}

TEST(Safetensors, TwoTensorsOfOneNameAreRefusedWhenWriting) {
  EXPECT_THAT(error_of([] {
                plan_file({{"a", Dtype::kF32, {1}}, {"a", Dtype::kF32, {1}}}, {});
              }),
              HasSubstr("two tensors of one file have the name 'a'"));
}

Manifest full_manifest() {
  Manifest manifest;
  manifest.library_version = "0.1.0";
  manifest.torch_version = "2.13.0";
  manifest.id = "0123";
  manifest.world_size = 3;
  manifest.files = {{"model.safetensors", 100, 7, {{"w", Dtype::kF32, {2, 3}, 0xfedcba98u, {"tied"}}}},
                    {"optimizer.safetensors", 16, 8, {}}};
  StoredEntry trainer;
  trainer.key = "trainer", trainer.kind = EntryKind::kOptimizer;
  trainer.file = "model.safetensors", trainer.state_file = "optimizer.safetensors";
  trainer.optimizer =
      StoredOptimizer{"AdamW", {{{{"lr", 0.1, false}, {"amsgrad", 1, true}}, {"w"}}}, 12, 1, 2, 25, "BF16"};
  StoredEntry scaler, integer, number, text;
  scaler.key = "scaler", scaler.kind = EntryKind::kScaler;
  scaler.scaler = StoredScaler{true, std::ldexp(1.0, 126), 2.0, 0.5, 4, 3, 2, 1};
  integer.key = "step", integer.integer = INT64_MIN;
  number.key = "loss", number.kind = EntryKind::kNumber, number.number = -0.0;
  text.key = "note", text.kind = EntryKind::kText, text.text = "line\n\"and\" \xe2\x82\xac";
  manifest.entries = {trainer, scaler, integer, number, text};
  return manifest;
}

TEST(Manifest, ComesBackBitExact) {
  const auto text = to_text(full_manifest());
  const auto manifest = parse_manifest(text, "m");
  EXPECT_EQ(to_text(manifest), text);
  EXPECT_EQ(manifest.step(), 12);
  EXPECT_EQ(manifest.file("model.safetensors")->tensors[0].crc32c, 0xfedcba98u);
  EXPECT_EQ(manifest.file("model.safetensors")->tensors[0].other_names, std::vector<std::string>{"tied"});
  EXPECT_EQ(manifest.entry("trainer")->optimizer->groups[0].options[1].value, 0.1);
  EXPECT_EQ(manifest.entry("scaler")->scaler->scale, std::ldexp(1.0, 126));
  EXPECT_EQ(manifest.entry("step")->integer, INT64_MIN);
  EXPECT_TRUE(std::signbit(manifest.entry("loss")->number));
  EXPECT_EQ(manifest.entry("note")->text, full_manifest().entries[4].text);
}

TEST(Manifest, NumbersThatJsonDoesNotHaveComeBack) {
  for (const double value : {double{INFINITY}, -double{INFINITY}, 5e-324, 1.0 / 3, 1e308}) {
    auto manifest = full_manifest();
    manifest.entries[3].number = value;
    EXPECT_EQ(parse_manifest(to_text(manifest), "m").entry("loss")->number, value);
  }
  auto manifest = full_manifest();
  manifest.entries[3].number = NAN;
  EXPECT_TRUE(std::isnan(parse_manifest(to_text(manifest), "m").entry("loss")->number));
}

TEST(Manifest, EveryFlippedBitAndEveryTruncationIsNoticed) {
  const auto text = to_text(full_manifest());
  for (size_t i = 0; i < text.size(); ++i) {
    auto damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    EXPECT_NE(error_of([&] { parse_manifest(damaged, "m"); }), "no error") << "byte " << i;
    EXPECT_THAT(error_of([&] { parse_manifest(text.substr(0, i), "m"); }),
                HasSubstr("m does not end with its checksum"));
  }
}

// ---- the staged folder ---------------------------------------------------------------------------------------------

void write_checkpoint(const StagedFolder& staged, const std::string& content) {
  Manifest manifest;
  manifest.library_version = manifest.torch_version = manifest.id = content;
  const auto planned = plan_file({{"t", Dtype::kU8, {static_cast<int64_t>(content.size())}}}, {});
  manifest.files = {{"model.safetensors",
                     planned.header.file_bytes,
                     crc32c(planned.bytes.data(), planned.bytes.size()),
                     {{"t", Dtype::kU8, planned.header.tensors[0].shape, crc32c(content.data(), content.size()), {}}}}};
  File file = staged.folder().create("model.safetensors");
  file.write(planned.bytes.data(), static_cast<int64_t>(planned.bytes.size()), 0);
  file.write(content.data(), static_cast<int64_t>(content.size()), planned.header.data_offset);
  const auto text = to_text(manifest);
  staged.folder().create(kManifestName).write(text.data(), static_cast<int64_t>(text.size()), 0);
}
void save(const std::string& destination, const std::string& content) {
  auto staged = StagedFolder::prepare(destination, content);
  write_checkpoint(staged, content);
  staged.commit();
}
std::string saved(const std::string& destination) { return read_manifest(Folder::open(destination)).id; }

TEST(StagedFolder, ASaveAppearsWholeAndLeavesNothingBeside) {
  const TemporaryFolder folder;
  save(folder / "runs/one", "first");
  EXPECT_EQ(saved(folder / "runs/one"), "first");
  save(folder / "runs/one/", "second");
  EXPECT_EQ(saved(folder / "runs/one"), "second");
  EXPECT_EQ(Folder::open(folder / "runs").names(), std::vector<std::string>{"one"});
}

TEST(StagedFolder, UntilCommitTheOldOneStaysAndADiscardedOneIsGone) {
  const TemporaryFolder folder;
  save(folder / "one", "first");
  {
    auto staged = StagedFolder::prepare(folder / "one", "second");
    write_checkpoint(staged, "second");
    EXPECT_EQ(saved(folder / "one"), "first");
    staged.discard();
  }
  EXPECT_EQ(saved(folder / "one"), "first");
  EXPECT_EQ(Folder::open(folder.path()).names(), std::vector<std::string>{"one"});
}

TEST(StagedFolder, WhatAKilledSaveLeftIsRemovedByTheNextOneOnly) {
  const TemporaryFolder folder;
  save(folder / "one", "first");
  save(folder / "other", "first");
  write_checkpoint(StagedFolder::prepare(folder / "one", "killed"), "killed");  // neither committed nor discarded
  write_checkpoint(StagedFolder::prepare(folder / "other", "running"), "running");
  save(folder / "one", "third");
  EXPECT_EQ(saved(folder / "one"), "third");
  EXPECT_EQ(Folder::open(folder.path()).names(), (std::vector<std::string>{".other.saving-running", "one", "other"}));
}

TEST(StagedFolder, FilesOfOthersAreNeverRemoved) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "mine");
  write_bytes(folder / "mine/thesis.tex", "years of work");
  EXPECT_THAT(error_of([&] { StagedFolder::prepare(folder / "mine", "x"); }),
              HasSubstr("exists and is not a trueshard checkpoint ('thesis.tex')"));
  save(folder / "one", "first");
  write_bytes(folder / "one/notes.txt", "n");
  EXPECT_THAT(error_of([&] { StagedFolder::prepare(folder / "one", "x"); }),
              HasSubstr("notes.txt' is not part of the checkpoint that is replaced"));
  write_bytes(folder / "file", "f");
  EXPECT_THAT(error_of([&] { StagedFolder::prepare(folder / "file", "x"); }), HasSubstr("is not a folder"));
  EXPECT_EQ(read_bytes(folder / "mine/thesis.tex"), "years of work");
  EXPECT_EQ(saved(folder / "one"), "first");
}

TEST(StagedFolder, AnEmptyFolderAndADamagedCheckpointMayBeReplaced) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "empty");
  save(folder / "empty", "first");
  EXPECT_EQ(saved(folder / "empty"), "first");
  write_bytes(folder / "empty/manifest.json", "{");
  save(folder / "empty", "second");
  EXPECT_EQ(saved(folder / "empty"), "second");
}

TEST(StagedFolder, ALinkToAFolderIsFollowedAndKept) {
  const TemporaryFolder folder;
  save(folder / "real", "first");
  fs::create_directory_symlink("real", folder / "latest");
  save(folder / "latest", "second");
  EXPECT_TRUE(fs::is_symlink(folder / "latest"));
  EXPECT_EQ(saved(folder / "real"), "second");
}

TEST(ReadManifest, NamesThePartThatIsDamagedSwappedOrGone) {
  const TemporaryFolder folder;
  save(folder / "one", "first");
  save(folder / "two", "other");
  const auto good = read_bytes(folder / "one/model.safetensors");
  const auto error = [&] { return error_of([&] { saved(folder / "one"); }); };
  write_bytes(folder / "one/model.safetensors", good.substr(0, good.size() - 1));
  EXPECT_THAT(error(),
              HasSubstr("model.safetensors' has " + std::to_string(good.size() - 1) + " bytes, the manifest says"));
  auto flipped = good;
  flipped[12] ^= 1;
  write_bytes(folder / "one/model.safetensors", flipped);
  EXPECT_THAT(error(), HasSubstr("model.safetensors'"));
  fs::remove(folder / "one/model.safetensors");
  EXPECT_THAT(error(), HasSubstr("cannot open '" + folder.path() + "/one/model.safetensors'"));
  fs::create_symlink(folder / "two/model.safetensors", folder / "one/model.safetensors");
  EXPECT_THAT(error(), HasSubstr("is a symbolic link"));
  fs::remove(folder / "one/model.safetensors");
  fs::create_directory(folder / "one/model.safetensors");
  EXPECT_THAT(error(), HasSubstr("is not a regular file"));
  EXPECT_THAT(error_of([&] { read_manifest(Folder::open(folder.path())); }), HasSubstr("it has no manifest.json"));
  EXPECT_THAT(error_of([&] { Folder::open(folder / "none"); }), HasSubstr("cannot open the folder"));
}

}  // namespace
}  // namespace trueshard::checkpoint
