// SPDX-License-Identifier: BSD-3-Clause
// Reduce-scatter, all-gather and all-reduce through c10d: this library against libtorch's Gloo, in the same processes,
// sample by sample. The floor is the time a plain copy needs for the bytes a rank must at least read and write, with
// all ranks copying at once. Usage: collectives_bench [rounds] [largest bytes]   prints one JSON line per row.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstring>
#include <map>

#include "bench/rank_processes.h"

namespace trueshard::bench {
namespace {

c10::intrusive_ptr<c10d::Backend> make_gloo(const Store& store, int rank, int world) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(120));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, world,
                                                     options);
}

struct Case {
  std::string name;
  double floor_bytes;  // read and written by one rank at least
  std::function<void()> call;
};

// The bytes of fp32 name the size. 16-bit rows have the same number of elements.
std::vector<Case> cases(const Group& ours, const c10::intrusive_ptr<c10d::Backend>& gloo, int64_t bytes, int world) {
  const int64_t n = bytes / 4 / world * world;
  auto whole = at::ones({n}), shard = at::ones({n / world});
  auto whole16 = at::ones({n}, at::kBFloat16), shard16 = at::ones({n / world}, at::kBFloat16);
  const double full = static_cast<double>(bytes), part = full / world;
  return {
      {"gloo reduce_scatter fp32", full + part, [=]() mutable { gloo->_reduce_scatter_base(shard, whole)->wait(); }},
      {"trueshard reduce_scatter fp32", full + part,
       [=]() mutable { ours->reduce_scatter_single(shard, whole)->wait(); }},
      {"gloo reduce_scatter bf16", full / 2 + part / 2,
       [=]() mutable { gloo->_reduce_scatter_base(shard16, whole16)->wait(); }},
      {"trueshard reduce_scatter bf16", full / 2 + part / 2,
       [=]() mutable { ours->reduce_scatter_single(shard16, whole16)->wait(); }},
      {"gloo all_gather fp32", part + full, [=]() mutable { gloo->_allgather_base(whole, shard)->wait(); }},
      {"trueshard all_gather fp32", part + full, [=]() mutable { ours->all_gather_single(whole, shard)->wait(); }},
      {"gloo all_gather bf16", part / 2 + full / 2, [=]() mutable { gloo->_allgather_base(whole16, shard16)->wait(); }},
      {"trueshard all_gather bf16", part / 2 + full / 2,
       [=]() mutable { ours->all_gather_single(whole16, shard16)->wait(); }},
      {"gloo all_reduce fp32", 2 * full,
       [=]() mutable {
         std::vector<at::Tensor> one{whole};
         gloo->allreduce(one)->wait();
       }},
      {"trueshard all_reduce fp32", 2 * full,
       [=]() mutable {
         std::vector<at::Tensor> one{whole};
         ours->allreduce(one)->wait();
       }},
      {"gloo all_reduce bf16", full,
       [=]() mutable {
         std::vector<at::Tensor> one{whole16};
         gloo->allreduce(one)->wait();
       }},
      {"trueshard all_reduce bf16", full,
       [=]() mutable {
         std::vector<at::Tensor> one{whole16};
         ours->allreduce(one)->wait();
       }},
  };
}

void run(int rank, int world, const Store& store, int rounds, int64_t largest) {
  const auto ours = init_process_group(c10::make_intrusive<c10d::PrefixStore>("ours", store), rank, world);
  const auto gloo = make_gloo(store, rank, world);
  for (const int64_t bytes : {int64_t{4} << 10, int64_t{32} << 10, int64_t{256} << 10, int64_t{1} << 20,
                              int64_t{25} << 20, int64_t{100} << 20}) {
    if (bytes > largest) break;
    auto all = cases(ours, gloo, bytes, world);
    const auto source = at::ones({bytes / 4});
    auto target = at::empty({bytes / 4});
    const int calls = bytes <= (1 << 20) ? 20 : 1;
    std::map<std::string, std::vector<double>> seconds;
    for (int round = 0; round < rounds + 1; ++round) {  // the first one warms up
      for (auto& each : all) {
        const double sample = slowest(ours, calls, each.call);
        if (round > 0) seconds[each.name].push_back(sample);
      }
      const double copy = slowest(
          ours, calls, [&] { std::memcpy(target.data_ptr(), source.const_data_ptr(), static_cast<size_t>(bytes)); });
      if (round > 0) seconds["copy"].push_back(copy);
    }
    if (rank != 0) continue;
    const double bandwidth = 2.0 * static_cast<double>(bytes) / median(seconds["copy"]);
    for (const auto& each : all) {
      auto& samples = seconds[each.name];
      std::printf(
          "{\"bench\": \"collectives\", \"ranks\": %d, \"bytes\": %lld, \"row\": \"%s\", \"us\": %.2f, \"us_min\": "
          "%.2f, \"us_max\": %.2f, \"floor_us\": %.2f}\n",
          world, static_cast<long long>(bytes), each.name.c_str(), 1e6 * median(samples),
          1e6 * *std::min_element(samples.begin(), samples.end()),
          1e6 * *std::max_element(samples.begin(), samples.end()), 1e6 * each.floor_bytes / bandwidth);
    }
  }
  ours->barrier()->wait();
}

}  // namespace
}  // namespace trueshard::bench

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const int64_t largest = argc > 2 ? std::atoll(argv[2]) : int64_t{25} << 20;
  bool ok = true;
  for (const int world : {2, 4}) {
    ok &= trueshard::bench::run_ranks(world, [&](int rank, int size, const trueshard::bench::Store& store) {
      trueshard::bench::run(rank, size, store, rounds, largest);
    });
  }
  return ok ? 0 : 1;
}
