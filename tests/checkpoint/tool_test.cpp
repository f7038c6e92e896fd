// SPDX-License-Identifier: BSD-3-Clause
// trueshard-checkpoint as a user runs it: output, exit status, files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cmath>
#include <cstdio>
#include <numeric>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/safetensors.h"
#include "tests/checkpoint/files.h"

namespace trueshard::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using trueshard::testing::read_bytes;
using trueshard::testing::TemporaryFolder;
using trueshard::testing::write_bytes;

struct Result {
  int status;
  std::string text;  // both streams
};
Result run(const std::string& arguments) {
  FILE* pipe = ::popen((std::string(TRUESHARD_TOOL) + " " + arguments + " 2>&1").c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
  const int status = ::pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

StoredFile write_file(const std::string& path, const std::vector<TensorInfo>& tensors,
                      const std::map<std::string, std::string>& data) {
  const auto planned = plan_file(tensors, {{"format", "pt"}});
  StoredFile stored{fs::path(path).filename().string(),
                    planned.header.file_bytes,
                    crc32c(planned.bytes.data(), planned.bytes.size()),
                    {}};
  std::string bytes = planned.bytes;
  for (const auto& tensor : planned.header.tensors) {
    const auto& values = data.at(tensor.name);
    bytes += values;
    stored.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, crc32c(values.data(), values.size()), {}});
  }
  write_bytes(path, bytes);
  return stored;
}

template <typename Value>
std::string bytes_of(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

// A checkpoint of a linear layer with a buffer.
void write_checkpoint(const std::string& folder, const std::vector<float>& weight) {
  fs::create_directories(folder);
  Manifest manifest;
  manifest.library_version = "0.1.0", manifest.torch_version = "2.13.0", manifest.id = folder, manifest.world_size = 4;
  manifest.files.push_back(
      write_file(folder + "/model.safetensors",
                 {{"lin.weight", Dtype::kF32, {2, 3}}, {"mean", Dtype::kF32, {2}}, {"count", Dtype::kI64, {}}},
                 {{"lin.weight", bytes_of(weight)},
                  {"mean", bytes_of<float>({0.1f, 0.2f})},
                  {"count", bytes_of<int64_t>({4097})}}));
  manifest.files.push_back(write_file(folder + "/optimizer.safetensors",
                                      {{"state.lin.weight.exp_avg", Dtype::kF32, {2, 3}}},
                                      {{"state.lin.weight.exp_avg", bytes_of<float>({1, 2, 3, 4, 5, 6})}}));
  StoredEntry trainer;
  trainer.key = "trainer", trainer.kind = EntryKind::kOptimizer;
  trainer.file = "model.safetensors", trainer.state_file = "optimizer.safetensors", trainer.buffers = {"mean", "count"};
  trainer.optimizer = StoredOptimizer{"AdamW", {{{{"lr", 0.25, false}}, {"lin.weight"}}}, 12, 1, 2, 25, ""};
  manifest.entries = {trainer};
  write_bytes(folder + "/manifest.json", to_text(manifest));
}

const std::vector<float> kWeight{1.0f, -2.5f, 1.0f + std::ldexp(1.0f, -9), 1e-40f, INFINITY, 3.0f};

TEST(Tool, InspectSaysWhatIsInIt) {
  const TemporaryFolder folder;
  write_checkpoint(folder / "c", kWeight);
  const auto text = run("inspect " + folder / "c");
  EXPECT_EQ(text.status, 0);
  EXPECT_THAT(text.text,
              AllOf(HasSubstr("4 tensors, 64 B"), HasSubstr("step 12, saved on 4 ranks"), HasSubstr("lr 0.25"),
                    HasSubstr("model.safetensors: 3 tensors, 40 B, 8 F32, 1 I64"), Not(HasSubstr("lin.weight F32"))));
  EXPECT_THAT(run("inspect --tensors " + folder / "c").text, HasSubstr("lin.weight F32 [2, 3] 24 B"));
  const auto json = run("inspect --json --tensors " + folder / "c");
  EXPECT_THAT(json.text, AllOf(HasSubstr("\"step\": 12"), HasSubstr("\"world_size\": 4"), HasSubstr("\"lin.weight\"")));
  EXPECT_THAT(run("inspect " + folder / "c/model.safetensors").text, HasSubstr("3 tensors, 40 B"));
}

TEST(Tool, VerifyFindsTheDamagedTensor) {
  const TemporaryFolder folder;
  write_checkpoint(folder / "c", kWeight);
  EXPECT_EQ(run("verify " + folder / "c").status, 0);
  EXPECT_THAT(run("verify " + folder / "c").text, HasSubstr("all 4 tensors (64 B) have their checksums"));
  auto bytes = read_bytes(folder / "c/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(folder / "c/model.safetensors", bytes);
  const auto bad = run("verify " + folder / "c");
  EXPECT_EQ(bad.status, 1);
  EXPECT_THAT(bad.text, HasSubstr("damaged: 'mean' in 'model.safetensors'"));
  EXPECT_THAT(run("verify --json " + folder / "c").text, AllOf(HasSubstr("\"ok\":false"), HasSubstr("'mean'")));
}

TEST(Tool, ExportRoundsParametersToNearestEvenAndKeepsBuffers) {
  const TemporaryFolder folder;
  write_checkpoint(folder / "c", kWeight);
  ASSERT_EQ(run("export --dtype bf16 " + folder / "c" + " " + folder / "out").status, 0);
  const auto bytes = read_bytes(folder / "out/model.safetensors");
  const auto header = read_header(open_regular(folder / "out/model.safetensors"));
  EXPECT_EQ(header.find("mean")->dtype, Dtype::kF32);
  EXPECT_EQ(header.find("count")->dtype, Dtype::kI64);
  const auto* weight = header.find("lin.weight");
  ASSERT_EQ(weight->dtype, Dtype::kBF16);
  std::vector<uint16_t> values(6);
  std::memcpy(values.data(), bytes.data() + header.data_offset + weight->begin, 12);
  // 1 + 2^-9 lies between 1 and 1 + 2^-7: to the nearer one; 1e-40 is 0x000116c2: to 0x0001.
  EXPECT_EQ(values, (std::vector<uint16_t>{0x3f80, 0xc020, 0x3f80, 0x0001, 0x7f80, 0x4040}));
  const auto again = run("export " + folder / "c" + " " + folder / "out");
  EXPECT_EQ(again.status, 2);
  EXPECT_THAT(again.text, HasSubstr("exists; --force writes over it"));
  ASSERT_EQ(run("export --force " + folder / "c" + " " + folder / "out").status, 0);
  EXPECT_EQ(read_header(open_regular(folder / "out/model.safetensors")).find("lin.weight")->dtype, Dtype::kF32);
  EXPECT_EQ(run("diff " + folder / "out/model.safetensors" + " " + folder / "c/model.safetensors").status, 0);
}

TEST(Tool, ALargeExportIsSeveralFilesWithAnIndex) {
  const TemporaryFolder folder;
  write_checkpoint(folder / "c", kWeight);
  ASSERT_EQ(run("export --max-file-bytes 35 " + folder / "c" + " " + folder / "out").status, 0);
  EXPECT_EQ(Folder::open(folder / "out").names(),
            (std::vector<std::string>{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                      "model.safetensors.index.json"}));
  const auto index = read_bytes(folder / "out/model.safetensors.index.json");
  EXPECT_THAT(index,
              AllOf(HasSubstr("\"total_size\": 40"), HasSubstr("\"mean\": \"model-00002-of-00002.safetensors\"")));
  EXPECT_THAT(run("inspect " + folder / "out").text, HasSubstr("3 tensors, 40 B"));
}

TEST(Tool, DiffShowsTheFirstDifferencesInUnitsOfTheLastPlace) {
  const TemporaryFolder folder;
  write_checkpoint(folder / "a", kWeight);
  auto other = kWeight;
  other[1] = std::nextafter(std::nextafter(other[1], -INFINITY), -INFINITY);
  other[5] = std::nextafter(other[5], INFINITY);
  write_checkpoint(folder / "b", other);
  const auto same = run("diff " + folder / "a" + " " + folder / "a");
  EXPECT_EQ(same.status, 0);
  EXPECT_THAT(same.text, HasSubstr("the same, to the bit"));
  const auto different = run("diff " + folder / "a" + " " + folder / "b");
  EXPECT_EQ(different.status, 1);
  EXPECT_THAT(different.text,
              AllOf(HasSubstr("'lin.weight': 2 of 6 elements differ, at most by 2 ULP; first [0, 1]: -2.5 and"),
                    Not(HasSubstr("mean"))));
  EXPECT_THAT(run("diff --json " + folder / "a" + " " + folder / "b").text,
              AllOf(HasSubstr("\"same\":false"), HasSubstr("\"most_ulps\":2"), HasSubstr("\"first\":1")));
}

TEST(Tool, ErrorsAreFriendlyAndHaveAStatusOfTheirOwn) {
  const TemporaryFolder folder;
  const auto missing = run("inspect " + folder / "none");
  EXPECT_EQ(missing.status, 2);
  EXPECT_EQ(missing.text, "trueshard-checkpoint: '" + folder / "none" + "' does not exist\n");
  write_bytes(folder / "x.safetensors", "short");
  EXPECT_EQ(run("inspect " + folder / "x.safetensors").status, 2);
  EXPECT_THAT(run("verify --json " + folder / "x.safetensors").text, HasSubstr("\"ok\":false"));
  EXPECT_NE(run("").status, 0);
  EXPECT_THAT(run("--help").text,
              AllOf(HasSubstr("inspect"), HasSubstr("verify"), HasSubstr("export"), HasSubstr("diff")));
  EXPECT_NE(run("export --dtype int8 a b").status, 0);
}

}  // namespace
}  // namespace trueshard::checkpoint
