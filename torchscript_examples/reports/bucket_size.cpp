// SPDX-License-Identifier: BSD-3-Clause
// "reduce_bucket_size influences training convergence of ZeRO-2": the same model and data with five bucket sizes, once
// with the sums that today's parts make (emulated below, in plain code), once with trueshard.
// Usage: report_bucket_size [steps]. Exits non-zero when trueshard's weights depend on the bucket size.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "torchscript_examples/reports/report.h"

namespace {

using namespace reports;

constexpr int kRanks = 4, kPasses = 16;
constexpr int64_t kBatch = 16;
const torch::optim::AdamWOptions kAdamW = torch::optim::AdamWOptions(1e-2);

struct Outcome {
  torch::Tensor weights;  // fp32 masters
  float loss = 0;
};
Outcome outcome_of(const torch::Tensor& weights) {
  Net net;
  const torch::NoGradGuard no_grad;
  int64_t at = 0;
  for (auto& p : net->parameters()) {
    p.copy_(weights.narrow(0, at, p.numel()).view(p.sizes()));
    at += p.numel();
  }
  return {weights, loss_over_all_tokens(net)};
}

// ---- today's parts, emulated ---------------------------------------------------------------------------------------

enum class Sums {
  kBf16EachPass,  // ZeRO-2: each micro-batch is reduced in bf16, the results add up in bf16
  kBf16Once,      // ZeRO-1: micro-batches add up in bf16 on each rank, reduced once in bf16
  kFp32Once,      // the same with both in fp32
  kFp64,          // no parts of today: the yardstick
};

float rounded(float value, bool bf16) { return bf16 ? static_cast<float>(c10::BFloat16(value)) : value; }

// A ring reduce-scatter: a bucket is cut into one chunk per rank; chunk c starts its way at rank c + 1 and ends at rank
// c, and every hop adds one rank's values and rounds. So the order in which an element's values are added depends on
// where in its bucket it lies.
std::vector<float> ring(const std::vector<std::vector<float>>& by_rank, int64_t bucket, bool bf16) {
  const auto count = static_cast<int64_t>(by_rank[0].size());
  std::vector<float> result(by_rank[0].size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = i / bucket * bucket;
    const int64_t size = std::min(bucket, count - start);
    const int64_t chunk = (i - start) / ((size + kRanks - 1) / kRanks);
    float sum = by_rank[static_cast<size_t>((chunk + 1) % kRanks)][static_cast<size_t>(i)];
    for (int64_t hop = 2; hop <= kRanks; ++hop)
      sum = rounded(sum + by_rank[static_cast<size_t>((chunk + hop) % kRanks)][static_cast<size_t>(i)], bf16);
    result[static_cast<size_t>(i)] = sum;
  }
  return result;
}
void add(std::vector<float>& to, const std::vector<float>& values, bool bf16) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = rounded(to[i] + values[i], bf16);
}

std::vector<float> leaf(Net& net, int64_t step, int64_t number) {
  net->zero_grad();
  loss_of(net, batch(step, number, kBatch)).backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& p : net->parameters()) gradients.push_back(p.grad());
  const auto all = flat(gradients);
  return {all.const_data_ptr<float>(), all.const_data_ptr<float>() + all.numel()};
}

// The mean over ranks of the sum over micro-batches.
torch::Tensor gradient(Net& net, int64_t step, Sums sums, int64_t bucket) {
  const bool bf16 = sums == Sums::kBf16EachPass || sums == Sums::kBf16Once;
  std::vector<std::vector<float>> local(kRanks);
  std::vector<float> total;
  torch::Tensor exact;
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto values = leaf(net, step, pass * kRanks + rank);
      auto& mine = local[static_cast<size_t>(rank)];
      if (mine.empty()) mine.assign(values.size(), 0.0f);
      if (sums == Sums::kBf16EachPass) mine.assign(values.size(), 0.0f);
      add(mine, values, bf16);
      const auto wide = torch::tensor(values).to(torch::kDouble);
      exact = exact.defined() ? exact + wide : wide;
    }
    if (sums != Sums::kBf16EachPass) continue;
    if (total.empty()) total.assign(local[0].size(), 0.0f);
    add(total, ring(local, bucket, bf16), bf16);
  }
  if (sums == Sums::kFp64) return (exact / kRanks).to(torch::kFloat);
  if (sums != Sums::kBf16EachPass) total = ring(local, bucket, bf16);
  auto mean = torch::tensor(total) / kRanks;
  return bf16 ? mean.to(torch::kBFloat16).to(torch::kFloat) : mean;
}

Outcome emulate(Sums sums, int64_t bucket, int steps) {
  Net net;
  auto weights = flat(net->parameters()).requires_grad_();
  net->to(torch::kBFloat16);
  torch::optim::AdamW optimizer({weights}, kAdamW);
  for (int step = 0; step < steps; ++step) {
    weights.mutable_grad() = gradient(net, step, sums, bucket);
    optimizer.step();
    const torch::NoGradGuard no_grad;
    int64_t at = 0;
    for (auto& p : net->parameters()) {
      p.copy_(weights.narrow(0, at, p.numel()).view(p.sizes()));
      at += p.numel();
    }
  }
  return outcome_of(weights.detach().clone());
}

// ---- trueshard -----------------------------------------------------------------------------------------------------

Outcome sharded(const trueshard::ShardOptions& base, int64_t bucket, int steps) {
  std::vector<torch::Tensor> weights(kRanks);
  run_ranks(kRanks, [&](int rank, const Group& group) {
    Net net;
    auto options = base;
    options.bucket_bytes(2 * bucket).mp_policy(trueshard::MixedPrecisionPolicy().param_dtype(torch::kBFloat16));
    auto optimizer = trueshard::shard(*net, torch::optim::AdamW(net->parameters(), kAdamW), group, options);
    for (int step = 0; step < steps; ++step) {
      optimizer->zero_grad();
      for (int pass = 0; pass < kPasses; ++pass) loss_of(net, batch(step, pass * kRanks + rank, kBatch)).backward();
      optimizer->step();
    }
    weights[static_cast<size_t>(rank)] = masters(*optimizer);
  });
  for (const auto& each : weights) {
    TORCH_CHECK(digest(each) == digest(weights[0]), "ranks ended with different weights");
  }
  return outcome_of(weights[0]);
}

// ---- the table -----------------------------------------------------------------------------------------------------

struct Column {
  const char* title;
  std::function<Outcome(int64_t bucket)> run;
  std::set<uint64_t> results{};
};

void print_row(std::vector<Column>& columns, int64_t bucket, const torch::Tensor& yardstick) {
  std::printf("%8lld", static_cast<long long>(bucket));
  for (auto& column : columns) {
    const auto outcome = column.run(bucket);
    column.results.insert(digest(outcome.weights));
    const double distance = ((outcome.weights - yardstick).norm() / yardstick.norm()).item<double>();
    std::printf("  %9.6f (%7.1e)", outcome.loss, distance);
    std::fflush(stdout);
  }
  std::printf("\n");
}

int report(int steps) {
  using trueshard::Stage;
  const auto zero1 = trueshard::ShardOptions().stage(Stage::Zero1), zero2 = trueshard::ShardOptions();
  std::vector<Column> columns{
      {"bf16, each pass", [&](int64_t bucket) { return emulate(Sums::kBf16EachPass, bucket, steps); }},
      {"bf16, once", [&](int64_t bucket) { return emulate(Sums::kBf16Once, bucket, steps); }},
      {"fp32, once", [&](int64_t bucket) { return emulate(Sums::kFp32Once, bucket, steps); }},
      {"trueshard ZeRO-1", [&](int64_t bucket) { return sharded(zero1, bucket, steps); }},
      {"trueshard ZeRO-2", [&](int64_t bucket) { return sharded(zero2, bucket, steps); }},
      {"the same, no overlap",
       [&](int64_t bucket) { return sharded(trueshard::ShardOptions(zero2).overlap(false), bucket, steps); }},
  };
  const int64_t whole = flat(Net()->parameters()).numel();
  std::printf(
      "%d ranks, %d micro-batches a step, %d steps, %lld bf16 weights with fp32 masters. Each cell: final loss "
      "(relative distance\nof the weights from those of a run that sums in fp64). Bucket sizes are in "
      "elements; the last one is the whole model.\n\n",
      kRanks, kPasses, steps, static_cast<long long>(whole));
  std::printf("%8s", "bucket");
  for (const auto& column : columns) std::printf("  %19s", column.title);
  std::printf("\n");
  const auto yardstick = emulate(Sums::kFp64, whole, steps).weights;
  const std::vector<int64_t> buckets{1, 50, 700, 3000, whole};
  for (const int64_t bucket : buckets) print_row(columns, bucket, yardstick);
  std::printf("%8s", "results");
  std::set<uint64_t> ours;
  for (size_t i = 0; i < columns.size(); ++i) {
    std::printf("  %12zu of %zu", columns[i].results.size(), buckets.size());
    if (i >= 3) ours.insert(columns[i].results.begin(), columns[i].results.end());
  }
  const bool kept = ours.size() == 1;
  std::printf(
      "\n\nWith ring sums the bucket size decides in which order values are added, and with bf16 sums what is "
      "lost: other weights for\nmost sizes. trueshard: %zu result%s over all sizes, ZeRO-1 and ZeRO-2, overlap "
      "on and off. Promise %s.\n",
      ours.size(), kept ? "" : "s", kept ? "kept" : "BROKEN");
  return kept ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return report(argc > 1 ? std::max(1, std::atoi(argv[1])) : 10);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "report_bucket_size: %s\n", error.what());
    return 2;
  }
}
