// SPDX-License-Identifier: BSD-3-Clause
// Saving and loading against one plain sequential writer and reader of the same bytes, interleaved in one run.
// usage: checkpoint_bench [FOLDER [MILLION_PARAMETERS [ROUNDS [RANKS...]]]]
// One JSON line per number of ranks: medians of seconds, and the median over rounds of each round's ratio to the plain
// writer or reader. fsync is part of all saves; loading goes into fresh memory everywhere.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstring>
#include <fstream>
#include <stdexcept>

#include <torch/optim/adamw.h>

#include <trueshard/trueshard.h>

#include "bench/rank_processes.h"

namespace {

using namespace trueshard;
using namespace trueshard::bench;

struct NetImpl : torch::nn::Module {
  std::vector<at::Tensor> weights;
  explicit NetImpl(int64_t millions) {
    for (int64_t i = 0; i < millions; ++i)
      weights.push_back(register_parameter("layer" + std::to_string(i) + "_weight", at::full({1000, 1000}, 0.01)));
  }
};

void check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

constexpr size_t kPiece = size_t{8} << 20;

void plain_write(const std::string& path, const std::vector<char>& bytes) {
  const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644);
  check(file >= 0, "open");
  for (size_t at = 0; at < bytes.size(); at += kPiece) {
    const size_t count = std::min(kPiece, bytes.size() - at);
    check(::write(file, bytes.data() + at, count) == static_cast<ssize_t>(count), "write");
  }
  check(::fsync(file) == 0, "fsync");
  ::close(file);
}

void plain_read(const std::string& path, size_t size) {
  const int file = ::open(path.c_str(), O_RDONLY);
  check(file >= 0, "open");
  char* memory = static_cast<char*>(std::malloc(size));
  for (size_t at = 0; at < size; at += kPiece) {
    const size_t count = std::min(kPiece, size - at);
    check(::read(file, memory + at, count) == static_cast<ssize_t>(count), "read");
  }
  std::free(memory);
  ::close(file);
}

struct Times {
  std::vector<double> raw_save, raw_load, save, load, stall, async_total, train_save;
};

std::vector<double> ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> result;
  for (size_t i = 0; i < a.size(); ++i) result.push_back(a[i] / b[i]);
  return result;
}

void run_rank(const std::string& folder, int64_t millions, int rounds, int rank, int world, const Store& store) {
  const Group group = init_process_group(store, rank, world);
  const auto net = std::make_shared<NetImpl>(millions);
  auto optimizer = shard(*net, torch::optim::AdamW(net->parameters(), 1e-4), group);
  for (const auto& weight : net->weights) (weight * at::ones_like(weight)).sum().backward();
  optimizer->step();
  optimizer->zero_grad();
  CheckpointState state;
  state.add("trainer", *optimizer);
  const auto bytes = static_cast<size_t>(millions * 1'000'000 * 12);
  const std::vector<char> buffer(rank == 0 ? bytes : 0, 'x');
  const std::string raw = folder + "/raw", ours = folder + "/ours";
  Times t;
  for (int round = -1; round < rounds; ++round) {  // round -1 warms up
    if (rank == 0) {
      std::filesystem::remove_all(raw);
      std::filesystem::remove_all(ours);
      ::sync();
    }
    const double raw_save = slowest(group, 1, [&] {
      if (rank == 0) plain_write(raw, buffer);
    });
    const double save = slowest(group, 1, [&] { save_checkpoint(ours, state); });
    const double raw_load = slowest(group, 1, [&] {
      if (rank == 0) plain_read(raw, bytes);
    });
    const double load = slowest(group, 1, [&] { load_checkpoint(ours, state); });
    if (rank == 0) std::filesystem::remove_all(ours);
    SaveHandle handle;
    const double start = now();
    const double stall =
        slowest(group, 1, [&] { handle = save_checkpoint(ours, state, CheckpointOptions().asynchronous(true)); });
    handle.wait();
    const double total = now() - start;
    if (round < 0) continue;
    t.raw_save.push_back(raw_save), t.save.push_back(save), t.raw_load.push_back(raw_load), t.load.push_back(load);
    t.stall.push_back(stall), t.async_total.push_back(total);
  }
  if (rank != 0) return;
  std::printf(
      "{\"ranks\": %d, \"bytes\": %zu, \"raw_save_s\": %.4f, \"save_s\": %.4f, \"save_over_raw\": %.3f, "
      "\"raw_load_s\": %.4f, "
      "\"load_s\": %.4f, \"load_over_raw\": %.3f, \"stall_s\": %.4f, \"stall_over_save\": %.3f, \"async_total_s\": "
      "%.4f}\n",
      world, bytes, median(t.raw_save), median(t.save), median(ratios(t.save, t.raw_save)), median(t.raw_load),
      median(t.load), median(ratios(t.load, t.raw_load)), median(t.stall), median(ratios(t.stall, t.save)),
      median(t.async_total));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string root = argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string();
  const int64_t millions = argc > 2 ? std::atoll(argv[2]) : 40;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  std::vector<int> worlds;
  for (int i = 4; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {2, 4};
  const std::string folder = root + "/trueshard-checkpoint-bench-" + std::to_string(::getpid());
  std::filesystem::create_directories(folder);
  bool ok = true;
  for (const int world : worlds)
    ok &= run_ranks(
        world, [&](int rank, int size, const Store& store) { run_rank(folder, millions, rounds, rank, size, store); });
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return ok ? 0 : 1;
}
