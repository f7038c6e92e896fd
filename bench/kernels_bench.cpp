// SPDX-License-Identifier: BSD-3-Clause
// Kernels next to plain memory traffic: every line times the kernel and a loop that only moves the same bytes, in
// turns, in this run. Arguments: rounds, part of a title. Output: median GB/s, and kernel over plain.
#include <ATen/ATen.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace trueshard::kernels {
namespace {

using Bytes = std::vector<char>;
std::string wanted;  // the part of a title that the command line asks for

// Of this thread on a processor: other programs' turns do not count.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double seconds(const std::function<void()>& work) {
  const double start = now();
  work();
  return now() - start;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Operands with room for a different start in each, so that their pages do not fall on the same cache sets.
class Buffers {
 public:
  Buffers(int count, int64_t bytes) {
    for (int i = 0; i < count; ++i) {
      storage_.emplace_back(static_cast<size_t>(bytes + 4096), char{0});
      char* start = storage_.back().data() + 64 * (static_cast<size_t>(i) * 5 % 64);
      starts_.push_back(start);
      for (int64_t k = 0; k + 1 < bytes; k += 2) {  // bfloat16 numbers between 1 and 2, halves of ordinary fp32 numbers
        const uint16_t value = static_cast<uint16_t>(0x3f80 + (k * 7 + i) % 128);
        std::memcpy(start + k, &value, sizeof(value));
      }
    }
  }
  char* operator[](int index) const { return starts_[static_cast<size_t>(index)]; }

 private:
  std::vector<Bytes> storage_;
  std::vector<char*> starts_;
};

// Reads every byte of the inputs and writes every byte of the outputs, all streams side by side, and nothing else.
struct Streams {
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  int64_t input_bytes, output_bytes;  // of each; one a multiple of the other
};
__attribute__((target("avx2"))) void move_bytes(const Streams& streams) {
  constexpr int64_t kLine = 64;
  const int64_t least = std::min(streams.input_bytes, streams.output_bytes);
  const int64_t input_part = kLine * streams.input_bytes / least, output_part = kLine * streams.output_bytes / least;
  __m256i low = _mm256_setzero_si256(), high = low;
  for (int64_t part = 0; part < least / kLine; ++part) {
    for (const char* input : streams.inputs) {
      for (int64_t at = part * input_part; at < (part + 1) * input_part; at += kLine) {
        low = _mm256_xor_si256(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(input + at)));
        high = _mm256_xor_si256(high, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(input + at + 32)));
      }
    }
    // What is written must be ordinary numbers again: the kernels read it in their turn.
    low = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x3f80));
    high = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x3f80));
    for (char* output : streams.outputs) {
      for (int64_t at = part * output_part; at < (part + 1) * output_part; at += kLine) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(output + at), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(output + at + 32), high);
      }
    }
  }
}

struct Entry {
  std::string label;
  std::function<void()> work;
};

// The first entry is the plain loop. Rounds go through all entries in turn; short work is repeated to last about 2 ms.
void compare(const std::string& title, double bytes, const std::vector<Entry>& entries, int rounds) {
  if (title.find(wanted) == std::string::npos) return;
  const int repeats = std::max(1, static_cast<int>(20e6 / bytes));
  std::vector<std::vector<double>> times(entries.size());
  for (int round = 0; round <= rounds; ++round) {
    for (size_t e = 0; e < entries.size(); ++e) {
      const double spent = seconds([&] {
        for (int i = 0; i < repeats; ++i) entries[e].work();
      });
      if (round > 0) times[e].push_back(spent / repeats);
    }
  }
  const double plain = median(times[0]);
  std::printf("%s\n", title.c_str());
  for (size_t e = 0; e < entries.size(); ++e) {
    const double time = median(times[e]);
    std::printf("  %-34s %9.1f us %7.2f GB/s  %5.2f x plain\n", entries[e].label.c_str(), time * 1e6,
                bytes / time * 1e-9, time / plain);
  }
}

std::vector<SumStep> tree_steps(int leaves) {
  std::vector<SumStep> steps;
  int pending = 0;
  for (int leaf = 0; leaf < leaves; ++leaf) {
    steps.push_back({SumStep::Kind::kLoad, static_cast<uint8_t>(leaf)});
    ++pending;
    for (int merged = leaf + 1; merged % 2 == 0; merged /= 2, --pending) steps.push_back({SumStep::Kind::kAdd, 0});
  }
  for (; pending > 1; --pending) steps.push_back({SumStep::Kind::kAdd, 0});
  steps.push_back({SumStep::Kind::kStore, 0});
  return steps;
}

void bench_sum(int leaves, int64_t leaf_bytes, DType output_dtype, int rounds) {
  const int64_t count = leaf_bytes / 2;
  const int64_t output_bytes = count * itemsize(output_dtype);
  const Buffers inputs(leaves, leaf_bytes), outputs(1, output_bytes);
  const std::vector<SumStep> steps = tree_steps(leaves);
  std::vector<Operand> operands;
  Streams streams{{}, {outputs[0]}, leaf_bytes, output_bytes};
  for (int leaf = 0; leaf < leaves; ++leaf) {
    operands.push_back({inputs[leaf], DType::kBFloat16});
    streams.inputs.push_back(inputs[leaf]);
  }
  std::vector<void*> targets = {outputs[0]};
  std::vector<double> squares(static_cast<size_t>((count + kBlock - 1) / kBlock));
  uint8_t nonfinite = 0;
  SumTreeCall call{
      steps.data(), static_cast<int>(steps.size()), operands.data(), targets.data(), count, false, output_dtype, {}};
  call.epilogue.divide = true;
  call.epilogue.divisor = leaves;
  SumTreeCall checked = call;
  checked.epilogue.nonfinite = &nonfinite;
  checked.epilogue.square_sums = squares.data();
  std::vector<Entry> entries = {{"plain read and write", [streams] { move_bytes(streams); }}};
  for (Isa isa : available_isas()) {
    if (isa == Isa::kReference) continue;
    entries.push_back({std::string("sum_tree ") + name(isa), [isa, call] { kernels(isa).sum_tree(call); }});
    entries.push_back({std::string("sum_tree + squares + nonfinite ") + name(isa),
                       [isa, checked] { kernels(isa).sum_tree(checked); }});
  }
  const std::string title = "sum of " + std::to_string(leaves) + " bf16 leaves of " + std::to_string(leaf_bytes >> 10) +
                            " KB to " + (output_dtype == DType::kFloat32 ? "fp32" : "bf16");
  compare(title, static_cast<double>(leaves * leaf_bytes + output_bytes), entries, rounds);
}

void libtorch_sqrt(float* data, int64_t count) { at::from_blob(data, {count}, at::kFloat).sqrt_(); }

void bench_adamw(int64_t count, int rounds) {
  const Buffers state(4, count * 4), copy(1, count * 2);
  const auto floats = [&state](int index) { return reinterpret_cast<float*>(state[index]); };
  const AdamCall call{count, floats(0),     floats(1), floats(2), floats(3), nullptr, {copy[0], DType::kBFloat16},
                      {},    true,          1e-9,      0.9,       0.999,     1e-8,    0.01,
                      10,    libtorch_sqrt, true};
  // Writes three of the four arrays and the copy, which is half an array.
  const Streams read{{state[0], state[1], state[2], state[3]}, {state[0], state[2], state[3]}, count * 4, count * 4};
  const Streams write{{}, {copy[0]}, count * 2, count * 2};
  std::vector<Entry> entries = {{"plain read and write", [read, write] {
                                   move_bytes(read);
                                   move_bytes(write);
                                 }}};
  for (Isa isa : available_isas()) {
    if (isa != Isa::kAvx2 && isa != Isa::kAvx512) continue;  // the plain build calls fma in libm for each element
    entries.push_back({std::string("adamw, bf16 copy, ") + name(isa), [isa, call] { kernels(isa).adam(call); }});
  }
  compare("adamw of " + std::to_string(count) + " elements with a bf16 copy", static_cast<double>(count) * 30, entries,
          rounds);
}

}  // namespace
}  // namespace trueshard::kernels

int main(int argc, char** argv) {
  using trueshard::kernels::DType;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  if (argc > 2) trueshard::kernels::wanted = argv[2];
  for (int64_t leaf_bytes : {int64_t{64} << 10, int64_t{1} << 20, int64_t{25} << 20}) {
    for (int leaves : {2, 4, 8}) trueshard::kernels::bench_sum(leaves, leaf_bytes, DType::kFloat32, rounds);
    trueshard::kernels::bench_sum(4, leaf_bytes, DType::kBFloat16, rounds);
  }
  for (int64_t count : {int64_t{1} << 16, int64_t{1} << 23}) trueshard::kernels::bench_adamw(count, rounds);
  return 0;
}
