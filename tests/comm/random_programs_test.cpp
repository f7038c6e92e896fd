// SPDX-License-Identifier: BSD-3-Clause
// A thousand random programs of collectives and transfers with random faults (field cases 29, 30 and 33): every call on
// every rank gives the right numbers or an error, what has no fault gives numbers, and every program ends. A failure
// names its seed; TRUESHARD_TEST_SEED=<seed> TRUESHARD_TEST_PROGRAMS=1 runs it again.
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace trueshard {
namespace {

using std::chrono::milliseconds;
using testing::Group;
using testing::Rank;
using testing::RankResults;

enum class Op {
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBarrier,
  kGather,
  kScatter,
  kRing,
  kCoalesced
};
constexpr int kOps = 10;
enum class Fault { kNone, kLate, kOtherSize, kOtherOp, kRefused, kLeaves, kStalls, kAborts };

struct Call {
  Op op = Op::kBarrier;
  at::ScalarType dtype = at::kFloat;
  int64_t elements = 0;
  int root = 0;
  bool async = false;
  Fault fault = Fault::kNone;
  int culprit = 0;
};

struct Program {
  int ranks = 2;
  std::vector<Call> calls;
  bool fatal = false;  // a fault after which the group may have failed
};

Program make_program(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  Program program;
  program.ranks = 2 + below(3);
  const at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kLong, at::kInt, at::kBFloat16};
  const int64_t sizes[] = {0, 1, 7, 300, 5000, 70000};
  for (int i = 0, n = 3 + below(8); i < n; ++i) {
    Call call{static_cast<Op>(below(kOps)), dtypes[below(5)], sizes[below(6)], below(program.ranks), below(2) == 1};
    call.culprit = below(program.ranks);
    if (below(4) == 0) call.fault = static_cast<Fault>(1 + below(4));
    if (below(40) == 0) call.fault = static_cast<Fault>(static_cast<int>(Fault::kLeaves) + below(3));
    // One call of one rank in place of several of the others, or of a transfer: they would wait for what never comes.
    const bool alone = call.op == Op::kRing || call.op == Op::kCoalesced;
    if (alone && (call.fault == Fault::kOtherOp || call.fault == Fault::kRefused)) call.fault = Fault::kNone;
    program.fatal = program.fatal || call.fault >= Fault::kLeaves;
    program.calls.push_back(call);
  }
  return program;
}

// What rank `rank` gives in call `index`: small whole numbers, so that every sum is exact in every dtype.
at::Tensor given(const Call& call, int index, int rank, int64_t elements) {
  return at::arange(elements, at::kLong).mul(3).add(rank + index).remainder(17).to(call.dtype);
}

at::Tensor sum_of(const Call& call, int index, int ranks, int64_t elements) {
  at::Tensor sum = at::zeros({elements}, call.dtype);
  for (int r = 0; r < ranks; ++r) sum.add_(given(call, index, r, elements));
  return sum;
}

class Runner {
 public:
  Runner(const Program& program, const Group& group) : program_(program), group_(group), rank_(group->getRank()) {}

  // Runs one call, waits for it and compares. Throws what the call throws.
  void run(const Call& call, int index) {
    const bool odd = call.culprit == rank_ && call.fault == Fault::kOtherSize;
    const int64_t n = call.elements + (odd ? 1 : 0);
    if (call.culprit == rank_ && call.fault == Fault::kOtherOp) {
      std::vector<at::Tensor> other{at::ones({3}, at::kChar)};
      group_->allreduce(other)->wait();
      return;
    }
    if (call.culprit == rank_ && call.fault == Fault::kRefused) {
      std::vector<at::Tensor> refused{at::ones({1}).expand({4})};
      group_->allreduce(refused)->wait();
      return;
    }
    switch (call.op) {
      case Op::kAllReduce:
      case Op::kCoalesced:
        return all_reduce(call, index, n);
      case Op::kBroadcast:
        return broadcast(call, index, n);
      case Op::kAllGather:
      case Op::kGather:
        return gather(call, index, n);
      case Op::kReduceScatter:
      case Op::kScatter:
      case Op::kAllToAll:
        return scatter(call, index, n);
      case Op::kRing:
        return ring(call, index, n);
      case Op::kBarrier:
        group_->barrier()->wait();
    }
  }

 private:
  void expect(const at::Tensor& got, const at::Tensor& expected, const Call& call) const {
    if (!at::equal(got, expected))
      throw std::logic_error("wrong numbers in operation " + std::to_string(static_cast<int>(call.op)));
  }

  void all_reduce(const Call& call, int index, int64_t n) {
    std::vector<at::Tensor> list{given(call, index, rank_, n)};
    c10d::AllreduceOptions options;
    options.asyncOp = call.async;
    if (call.op == Op::kCoalesced) {
      group_->startCoalescing(c10::DeviceType::CPU);
      std::vector<at::Tensor> second{given(call, index + 1, rank_, n)};
      group_->allreduce(list, options);
      group_->allreduce(second, options);
      group_->endCoalescing(c10::DeviceType::CPU)->wait();
      expect(second[0], sum_of(call, index + 1, program_.ranks, n), call);
    } else {
      group_->allreduce(list, options)->wait();
    }
    expect(list[0], sum_of(call, index, program_.ranks, n), call);
  }

  void broadcast(const Call& call, int index, int64_t n) {
    std::vector<at::Tensor> list{given(call, index, rank_, n)};
    c10d::BroadcastOptions options;
    options.rootRank = call.root;
    options.asyncOp = call.async;
    group_->broadcast(list, options)->wait();
    expect(list[0], given(call, index, call.root, n), call);
  }

  void gather(const Call& call, int index, int64_t n) {
    std::vector<at::Tensor> input{given(call, index, rank_, n)};
    const bool whole = call.op == Op::kAllGather || call.root == rank_;
    std::vector<std::vector<at::Tensor>> outputs(whole ? 1 : 0);
    for (int r = 0; whole && r < program_.ranks; ++r) outputs[0].push_back(at::empty({n}, call.dtype));
    if (call.op == Op::kAllGather) {
      group_->allgather(outputs, input)->wait();
    } else {
      c10d::GatherOptions options;
      options.rootRank = call.root;
      group_->gather(outputs, input, options)->wait();
    }
    for (int r = 0; whole && r < program_.ranks; ++r)
      expect(outputs[0][static_cast<size_t>(r)], given(call, index, r, n), call);
  }

  void scatter(const Call& call, int index, int64_t n) {
    std::vector<at::Tensor> pieces, output{at::empty({n}, call.dtype)};
    for (int r = 0; r < program_.ranks; ++r) pieces.push_back(given(call, index + r, rank_, n));
    if (call.op == Op::kAllToAll) {
      std::vector<at::Tensor> outputs;
      for (int r = 0; r < program_.ranks; ++r) outputs.push_back(at::empty({n}, call.dtype));
      group_->alltoall(outputs, pieces)->wait();
      for (int r = 0; r < program_.ranks; ++r)
        expect(outputs[static_cast<size_t>(r)], given(call, index + rank_, r, n), call);
      return;
    }
    std::vector<std::vector<at::Tensor>> inputs{pieces};
    if (call.op == Op::kReduceScatter) {
      group_->reduce_scatter(output, inputs)->wait();
      return expect(output[0], sum_of(call, index + rank_, program_.ranks, n), call);
    }
    c10d::ScatterOptions options;
    options.rootRank = call.root;
    if (call.root != rank_) inputs.clear();
    group_->scatter(output, inputs, options)->wait();
    expect(output[0], given(call, index + rank_, call.root, n), call);
  }

  void ring(const Call& call, int index, int64_t n) {
    const int next = (rank_ + 1) % program_.ranks, before = (rank_ + program_.ranks - 1) % program_.ranks;
    std::vector<at::Tensor> out{given(call, index, rank_, n)}, in{at::empty({call.elements}, call.dtype)};
    const auto receive = group_->recv(in, before, index), send = group_->send(out, next, index);
    std::exception_ptr error;
    for (const auto& work : {send, receive}) {
      try {
        work->wait();
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    expect(in[0], given(call, index, before, call.elements), call);
  }

  const Program& program_;
  Group group_;
  int rank_;
};

// Empty: as it must be.
std::string verdict(const Program& program, const Call& call, const std::string& error, bool wrong) {
  if (wrong) return error;
  const bool must_fail = call.fault >= Fault::kOtherSize && call.fault <= Fault::kRefused && call.op != Op::kRing;
  if (error.empty()) {
    const bool same = call.fault == Fault::kOtherSize && call.op == Op::kBarrier;
    return must_fail && !same && !program.fatal ? "a call that ranks made differently was not an error" : "";
  }
  if (program.fatal || call.fault >= Fault::kOtherSize) return {};
  return "a call without a fault: " + error;
}

std::string run_program(const Program& program, Rank& rank) {
  Group group = rank.group(milliseconds(program.fatal ? 250 : 60000));
  auto runner = std::make_unique<Runner>(program, group);
  for (size_t i = 0; i < program.calls.size(); ++i) {
    const Call& call = program.calls[i];
    if (call.culprit == rank.rank) {
      if (call.fault == Fault::kLate) std::this_thread::sleep_for(milliseconds(5));
      if (call.fault == Fault::kStalls) std::this_thread::sleep_for(milliseconds(600));
      if (call.fault == Fault::kLeaves) return {};
      if (call.fault == Fault::kAborts) group->getBackend(c10::DeviceType::CPU)->abort();
    }
    std::string error;
    bool wrong = false;
    try {
      runner->run(call, static_cast<int>(i));
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    } catch (const std::exception& e) {
      error = e.what();
      wrong = true;
    }
    const std::string text = verdict(program, call, error, wrong);
    if (!text.empty()) return "call " + std::to_string(i) + ": " + text;
  }
  return {};
}

// Ends the process, with the seed, when a program hangs.
class Watch {
 public:
  explicit Watch(uint64_t seed)
      : thread_([this, seed] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (ended_.wait_for(lock, std::chrono::seconds(120), [this] { return done_; })) return;
          std::cerr << "the program with seed " << seed << " did not end" << std::endl;
          std::abort();
        }) {}
  ~Watch() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    ended_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;
};

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(RandomPrograms, EndAndNeverGiveWrongNumbers) {
  const uint64_t first = number_from("TRUESHARD_TEST_SEED", std::random_device()());
  const uint64_t count = number_from("TRUESHARD_TEST_PROGRAMS", 1000);
  std::cout << "seeds " << first << " to " << first + count - 1 << std::endl;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Program program = make_program(seed);
    const Watch watch(seed);
    const RankResults results =
        testing::run_thread_ranks(program.ranks, [&](Rank& rank) { return run_program(program, rank); });
    for (const auto& result : results) {
      ASSERT_TRUE(result.ok() && result.report.empty()) << "seed " << seed << ": " << result.report << results;
    }
  }
}

}  // namespace
}  // namespace trueshard
