// SPDX-License-Identifier: BSD-3-Clause
// The c10d operations against serial references written with torch's own element-wise arithmetic.
#include "plugin/comm/backend.h"

#include <gmock/gmock.h>

#include <ATen/ATen.h>
#include <fstream>
#include <random>

#include "plugin/observe/trace.h"
#include "tests/support/ranks.h"

namespace trueshard::comm {
namespace {

using c10d::ReduceOp;
using testing::Group;
using ::testing::HasSubstr;
using testing::RankResults;

// Leaf of one rank: values that round, of both signs, with few exact ties.
at::Tensor leaf(int rank, int64_t elements, at::ScalarType dtype, uint64_t seed = 1) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(rank));
  at::Tensor values = at::empty({elements}, at::kDouble);
  std::uniform_real_distribution<double> uniform(-100, 100);
  double* data = values.data_ptr<double>();
  for (int64_t i = 0; i < elements; ++i) data[i] = uniform(random);
  if (dtype == at::kBool) return values > 0;
  return values.to(dtype);
}

// docs/numerics.md section 1, literally.
at::Tensor tree(const std::vector<at::Tensor>& leaves, size_t low, size_t high, bool product) {
  const size_t count = high - low;
  if (count == 1) return leaves[low];
  size_t split = 1;
  while (split * 2 < count) split *= 2;
  const at::Tensor left = tree(leaves, low, low + split, product), right = tree(leaves, low + split, high, product);
  return product ? left * right : left + right;
}

at::Tensor reference(const std::vector<at::Tensor>& leaves, ReduceOp::RedOpType op, double factor = 1) {
  const at::ScalarType dtype = leaves[0].scalar_type();
  const bool floating = at::isFloatingType(dtype);
  const at::ScalarType wide = !floating ? dtype : dtype == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> values;
  for (const at::Tensor& l : leaves) values.push_back(l.to(wide));
  at::Tensor result = values[0];
  if (op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM || op == ReduceOp::PRODUCT) {
    if (dtype == at::kBool) {
      for (const at::Tensor& v : values)
        result = op == ReduceOp::PRODUCT ? result.logical_and(v) : result.logical_or(v);
      return result;
    }
    result = tree(values, 0, values.size(), op == ReduceOp::PRODUCT);
    if (op == ReduceOp::AVG) result = result / at::full({}, static_cast<double>(leaves.size()), wide);
    if (op == ReduceOp::PREMUL_SUM) result = result * at::full({}, factor, wide);
    return result.to(dtype);
  }
  for (size_t i = 1; i < values.size(); ++i) {
    const at::Tensor& v = values[i];
    if (op == ReduceOp::MIN) result = at::minimum(result, v);
    if (op == ReduceOp::MAX) result = at::maximum(result, v);
    if (op == ReduceOp::BAND) result = result.bitwise_and(v);
    if (op == ReduceOp::BOR) result = result.bitwise_or(v);
    if (op == ReduceOp::BXOR) result = result.bitwise_xor(v);
  }
  return result.to(dtype);
}

std::vector<at::Tensor> leaves_of(int world, int64_t elements, at::ScalarType dtype, uint64_t seed = 1) {
  std::vector<at::Tensor> leaves;
  for (int r = 0; r < world; ++r) leaves.push_back(leaf(r, elements, dtype, seed));
  return leaves;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

c10d::AllreduceOptions all_reduce_options(const ReduceOp& op, bool async = true) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = async;
  return options;
}

void all_reduce(const Group& group, at::Tensor tensor, const ReduceOp& op = ReduceOp::SUM, bool async = false) {
  std::vector<at::Tensor> list{tensor};
  group->allreduce(list, all_reduce_options(op, async))->wait();
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return testing::detail::text_of(error);
  }
  return "no error";
}

struct Case {
  ReduceOp op;
  at::ScalarType dtype;
};
std::vector<Case> cases() {
  const auto premul = c10d::makePreMulSum(0.3);
  std::vector<Case> list;
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX})
      list.push_back({op, dtype});
    list.push_back({premul, dtype});
  }
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,
                          ReduceOp::BXOR}) {
      list.push_back({op, dtype});
    }
  }
  return list;
}

// Every reducing operation x dtype x reduction against the serial reference.
TEST(Backend, EveryReductionGivesTheBitsOfTheSerialTree) {
  for (const int world : {1, 2, 3, 4, 5}) {
    const RankResults results = testing::run_threads(world, [world](int rank, const Group& group) {
      const int64_t n = 67;
      for (const Case& c : cases()) {
        const auto op = static_cast<ReduceOp::RedOpType>(c.op);
        const auto expected = reference(leaves_of(world, n, c.dtype), op, 0.3);
        const std::string what =
            c10::toString(c.dtype) + std::string(" op ") + std::to_string(op) + " world " + std::to_string(world);
        at::Tensor mine = leaf(rank, n, c.dtype);
        all_reduce(group, mine, c.op);
        EXPECT_TRUE(same_bits(mine, expected)) << "allreduce " << what;

        mine = leaf(rank, n, c.dtype);
        std::vector<at::Tensor> list{mine};
        c10d::ReduceOptions reduce_options;
        reduce_options.reduceOp = c.op;
        reduce_options.rootRank = world - 1;
        group->reduce(list, reduce_options)->wait();
        EXPECT_TRUE(same_bits(mine, rank == world - 1 ? expected : leaf(rank, n, c.dtype))) << "reduce " << what;

        const auto long_leaves = leaves_of(world, n * world, c.dtype);
        const auto piece = reference(long_leaves, op, 0.3).narrow(0, rank * n, n);
        at::Tensor output = at::empty({n}, mine.options()), input = long_leaves[static_cast<size_t>(rank)];
        c10d::ReduceScatterOptions scatter_options;
        scatter_options.reduceOp = c.op;
        group->reduce_scatter_single(output, input, scatter_options)->wait();
        EXPECT_TRUE(same_bits(output, piece)) << "_reduce_scatter_base " << what;
        output.zero_();
        std::vector<at::Tensor> outputs{output};
        std::vector<std::vector<at::Tensor>> inputs{input.chunk(world)};
        group->reduce_scatter(outputs, inputs, scatter_options)->wait();
        EXPECT_TRUE(same_bits(output, piece)) << "reduce_scatter " << what;
      }
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Backend, LargeArraysGiveTheBitsOfTheSerialTreeWhateverTheChunks) {
  // Sizes around the chunks of 64K and 256K elements, and around the limit of the direct way.
  for (const int64_t n : {8191, 8193, 65537, 200001, 1048577}) {
    for (const int world : {2, 3, 5}) {
      if (n > 500000 && world == 5) continue;
      const auto leaves = leaves_of(world, n, at::kBFloat16);
      const auto expected = reference(leaves, ReduceOp::AVG);
      const RankResults results = testing::run_threads(world, [&](int rank, const Group& group) {
        at::Tensor mine = leaves[static_cast<size_t>(rank)].clone();
        all_reduce(group, mine, ReduceOp::AVG);
        EXPECT_TRUE(same_bits(mine, expected)) << n << " " << world;
        at::Tensor input = leaves[static_cast<size_t>(rank)].narrow(0, 0, n / world * world).clone();
        at::Tensor output = at::empty({n / world}, input.options());
        c10d::ReduceScatterOptions options;
        options.reduceOp = ReduceOp::AVG;
        group->reduce_scatter_single(output, input, options)->wait();
        EXPECT_TRUE(same_bits(output, expected.narrow(0, rank * (n / world), n / world))) << n << " " << world;
        at::Tensor gathered = at::empty({world * n}, input.options());
        at::Tensor whole = leaves[static_cast<size_t>(rank)];
        group->all_gather_single(gathered, whole)->wait();
        EXPECT_TRUE(same_bits(gathered, at::cat(leaves)));
      });
      ASSERT_TRUE(results.ok()) << results;
    }
  }
}

// A leaf order that shows in the bits: with any other tree the result differs.
TEST(Backend, TheOrderIsTheSameForThreadsAndProcessesAndEveryRun) {
  for (const int world : {3, 4, 5, 8}) {
    const auto expected = reference(leaves_of(world, 10001, at::kFloat, 7), ReduceOp::SUM);
    const auto work = [&](int rank, const Group& group) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        at::Tensor mine = leaf(rank, 10001, at::kFloat, 7);
        all_reduce(group, mine, ReduceOp::SUM, repeat % 2 == 1);
        EXPECT_TRUE(same_bits(mine, expected));
      }
    };
    RankResults results = testing::run_threads(world, work);
    ASSERT_TRUE(results.ok()) << results;
    if (world > 4) continue;
    results = testing::run_processes(world, work);
    ASSERT_TRUE(results.ok()) << results;
  }
}

// Field case 3.
TEST(Backend, AnAverageDividesByTheNumberOfRanks) {
  RankResults results = testing::run_threads(2, [](int rank, const Group& group) {
    at::Tensor input = rank == 0 ? at::tensor({2.f, 4.f, 6.f, 8.f}) : at::tensor({4.f, 8.f, 12.f, 16.f});
    at::Tensor output = at::empty({2});
    c10d::ReduceScatterOptions options;
    options.reduceOp = ReduceOp::AVG;
    group->reduce_scatter_single(output, input, options)->wait();
    EXPECT_TRUE(at::equal(output, rank == 0 ? at::tensor({3.f, 6.f}) : at::tensor({9.f, 12.f})));
  });
  ASSERT_TRUE(results.ok()) << results;
  results = testing::run_threads(4, [](int rank, const Group& group) {
    at::Tensor input = at::arange(12, at::kFloat) * (rank + 1), output = at::empty({3});
    c10d::ReduceScatterOptions options;
    options.reduceOp = ReduceOp::AVG;
    group->reduce_scatter_single(output, input, options)->wait();
    EXPECT_TRUE(at::equal(output, at::arange(12, at::kFloat).narrow(0, rank * 3, 3) * 2.5));
    at::Tensor integers = at::ones({4}, at::kLong);
    const std::string error = error_of([&] { all_reduce(group, integers, ReduceOp::AVG); });
    EXPECT_THAT(
        error,
        HasSubstr("'avg' of int64 is not defined, it would have to round; use sum and divide, or a floating type"));
    EXPECT_THAT(error, HasSubstr("trueshard[rank " + std::to_string(rank) + "/4]"));
    EXPECT_TRUE(at::equal(integers, at::ones({4}, at::kLong)));
    at::Tensor after = at::ones({1});
    all_reduce(group, after);
    EXPECT_EQ(after.item<float>(), 4);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field cases 2 and 4.
TEST(Backend, SixteenBitMeansNeitherOverflowNorVanish) {
  for (const int world : {3, 4}) {
    const RankResults results = testing::run_threads(world, [world](int rank, const Group& group) {
      const auto mean = [&](double value, at::ScalarType dtype) {
        at::Tensor tensor = at::full({3}, value, dtype);
        all_reduce(group, tensor, ReduceOp::AVG);
        return tensor[1].item<double>();
      };
      EXPECT_EQ(mean(30000, at::kHalf), 30000);
      EXPECT_EQ(mean(std::ldexp(1.0, -24), at::kHalf), std::ldexp(1.0, -24));
      EXPECT_TRUE(std::isfinite(mean(rank == 0 ? 60000 : -60000, at::kHalf)));
      if (world == 4) {
        // 64.75 and 512.75, rounded once to the nearest even (sums in 16 bits give 64 and 512).
        EXPECT_EQ(mean(rank == 0 ? 256 : 1, at::kBFloat16), 65);
        EXPECT_EQ(mean(rank == 0 ? 2048 : 1, at::kHalf), 513);
      }
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Backend, NanAndNegativeZeroSurvive) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
      for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
        for (int bad = 0; bad < 3; ++bad) {
          at::Tensor tensor = at::full({2}, rank == bad ? NAN : rank + 1.0, dtype);
          all_reduce(group, tensor, op);
          EXPECT_TRUE(tensor.isnan().all().item<bool>()) << dtype << " " << bad;
        }
      }
      at::Tensor zero = at::full({2}, -0.0, dtype);
      all_reduce(group, zero);
      EXPECT_TRUE(zero.signbit().all().item<bool>()) << dtype;
    }
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Backend, BytesArriveByEveryMovingOperation) {
  for (const int world : {1, 2, 3, 4}) {
    const RankResults results = testing::run_threads(world, [world](int rank, const Group& group) {
      for (const int64_t n : {0, 1, 5, 100000}) {
        const auto leaves = leaves_of(world, n, at::kFloat, 3);
        at::Tensor mine = leaves[static_cast<size_t>(rank)].clone();
        const int root = world - 1;
        std::vector<at::Tensor> outs;
        for (int r = 0; r < world; ++r) outs.push_back(at::full({n}, -1.0f));
        std::vector<std::vector<at::Tensor>> out_lists{outs};
        std::vector<at::Tensor> ins{mine};
        group->allgather(out_lists, ins)->wait();
        for (int r = 0; r < world; ++r)
          EXPECT_TRUE(same_bits(outs[static_cast<size_t>(r)], leaves[static_cast<size_t>(r)])) << n;

        c10d::GatherOptions gather_options;
        gather_options.rootRank = root;
        std::vector<std::vector<at::Tensor>> gathered;
        if (rank == root) {
          gathered.push_back({});
          for (int r = 0; r < world; ++r) gathered[0].push_back(at::full({n}, -1.0f));
        }
        group->gather(gathered, ins, gather_options)->wait();
        for (int r = 0; r < world && rank == root; ++r) {
          EXPECT_TRUE(same_bits(gathered[0][static_cast<size_t>(r)], leaves[static_cast<size_t>(r)])) << n;
        }

        c10d::ScatterOptions scatter_options;
        scatter_options.rootRank = root;
        std::vector<std::vector<at::Tensor>> to_scatter;
        if (rank == root) to_scatter.push_back(leaves);
        std::vector<at::Tensor> scattered{at::full({n}, -1.0f)};
        group->scatter(scattered, to_scatter, scatter_options)->wait();
        EXPECT_TRUE(same_bits(scattered[0], mine)) << n;

        c10d::BroadcastOptions broadcast_options;
        broadcast_options.rootRank = root;
        std::vector<at::Tensor> sent{mine.clone()};
        group->broadcast(sent, broadcast_options)->wait();
        EXPECT_TRUE(same_bits(sent[0], leaves[static_cast<size_t>(root)])) << n;
      }
      group->barrier()->wait();
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Backend, AllToAllExchangesEvenAndUnevenPieces) {
  for (const int world : {1, 2, 3, 4}) {
    const RankResults results = testing::run_threads(world, [world](int rank, const Group& group) {
      for (const int64_t unit : {1, 100000}) {
        // Rank a sends (a + b) % 3 * unit rows, all of value 10 a + b, to rank b; none at all for some pairs.
        std::vector<int64_t> send, receive;
        std::vector<at::Tensor> parts, expected;
        for (int other = 0; other < world; ++other) {
          send.push_back((rank + other) % 3 * unit);
          receive.push_back((rank + other) % 3 * unit);
          parts.push_back(at::full({send.back(), 2}, 10 * rank + other, at::kInt));
          expected.push_back(at::full({receive.back(), 2}, 10 * other + rank, at::kInt));
        }
        at::Tensor input = at::cat(parts), want = at::cat(expected), output = at::full_like(want, -1);
        group->all_to_all_single(output, input, receive, send)->wait();
        EXPECT_TRUE(at::equal(output, want));
        std::vector<at::Tensor> outputs;
        for (const at::Tensor& e : expected) outputs.push_back(at::full_like(e, -1));
        group->alltoall(outputs, parts)->wait();
        EXPECT_TRUE(at::equal(at::cat(outputs), want));
      }
      at::Tensor input = at::arange(world * 2, at::kFloat) + 100 * rank, output = at::empty({world * 2});
      std::vector<int64_t> none;
      group->all_to_all_single(output, input, none, none)->wait();
      for (int r = 0; r < world; ++r) EXPECT_EQ(output[2 * r].item<float>(), 100 * r + 2 * rank);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

TEST(Backend, CoalescedOperationsDoWhatTheSingleOnesDo) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    auto backend = group->getBackend(c10::DeviceType::CPU);
    std::vector<at::Tensor> tensors{leaf(rank, 7, at::kFloat), leaf(rank, 3, at::kBFloat16), leaf(rank, 0, at::kFloat)};
    c10d::AllreduceCoalescedOptions options;
    backend->allreduce_coalesced(tensors, options)->wait();
    EXPECT_TRUE(same_bits(tensors[0], reference(leaves_of(3, 7, at::kFloat), ReduceOp::SUM)));
    EXPECT_TRUE(same_bits(tensors[1], reference(leaves_of(3, 3, at::kBFloat16), ReduceOp::SUM)));
    std::vector<at::Tensor> inputs{leaf(rank, 4, at::kFloat), leaf(rank, 2, at::kLong)};
    std::vector<at::Tensor> outputs{at::empty({12}), at::empty({6}, at::kLong)};
    backend->allgather_into_tensor_coalesced(outputs, inputs)->wait();
    EXPECT_TRUE(same_bits(outputs[0], at::cat(leaves_of(3, 4, at::kFloat))));
    EXPECT_TRUE(same_bits(outputs[1], at::cat(leaves_of(3, 2, at::kLong))));
    std::vector<std::vector<at::Tensor>> lists;
    for (int r = 0; r < 3; ++r) lists.push_back({at::empty({4}), at::empty({2}, at::kLong)});
    backend->allgather_coalesced(lists, inputs)->wait();
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(same_bits(lists[static_cast<size_t>(r)][1], leaf(r, 2, at::kLong)));
    std::vector<at::Tensor> wide{leaf(rank, 6, at::kFloat), leaf(rank, 3, at::kFloat)},
        narrow{at::empty({2}), at::empty({1})};
    backend->reduce_scatter_tensor_coalesced(narrow, wide)->wait();
    EXPECT_TRUE(same_bits(narrow[0], reference(leaves_of(3, 6, at::kFloat), ReduceOp::SUM).narrow(0, 2 * rank, 2)));
    EXPECT_TRUE(same_bits(narrow[1], reference(leaves_of(3, 3, at::kFloat), ReduceOp::SUM).narrow(0, rank, 1)));
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 27.
TEST(Backend, EmptyTensorsKeepTheirShapesAndTheSequence) {
  for (const int world : {2, 4}) {
    const RankResults results = testing::run_threads(world, [world](int rank, const Group& group) {
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0}, std::vector<int64_t>{1, 0, 2}}) {
        at::Tensor empty = at::empty(shape);
        all_reduce(group, empty);
        EXPECT_EQ(empty.sizes(), at::IntArrayRef(shape));
        at::Tensor output = at::empty({0}), input = at::empty({0});
        group->all_gather_single(output, input)->wait();
        group->reduce_scatter_single(output, input)->wait();
        std::vector<at::Tensor> list{empty};
        group->broadcast(list)->wait();
        group->reduce(list)->wait();
        std::vector<int64_t> none;
        group->all_to_all_single(output, input, none, none)->wait();
      }
      at::Tensor one = at::full({1}, rank + 1.0);
      all_reduce(group, one);
      EXPECT_EQ(one.item<float>(), static_cast<float>(world * (world + 1) / 2));
      EXPECT_EQ(group->getBackend(c10::DeviceType::CPU)->getSequenceNumberForGroup(), 13u);
    });
    ASSERT_TRUE(results.ok()) << results;
  }
}

// Field case 28.
TEST(Backend, StridedTensorsAreRightAndWhatLiesBetweenIsUntouched) {
  const RankResults results = testing::run_threads(2, [](int rank, const Group& group) {
    at::Tensor storage = at::full({2, 2}, -7.0f);
    at::Tensor column = storage.select(1, 0);
    column.fill_(rank + 1);
    all_reduce(group, column);
    EXPECT_TRUE(at::equal(storage, at::tensor({3.f, -7.f, 3.f, -7.f}).view({2, 2})));
    column.fill_(rank);
    std::vector<at::Tensor> list{column};
    group->broadcast(list)->wait();
    EXPECT_TRUE(at::equal(storage, at::tensor({0.f, -7.f, 0.f, -7.f}).view({2, 2})));
    at::Tensor transposed = (at::arange(6, at::kFloat).view({2, 3}) * (rank + 1)).t();
    all_reduce(group, transposed);
    EXPECT_TRUE(at::equal(transposed, at::arange(6, at::kFloat).view({2, 3}).t() * 3));
    at::Tensor wide = at::full({4, 2}, -7.0f), gathered = wide.select(1, 1), input = column;
    column.fill_(rank + 5);
    group->all_gather_single(gathered, input)->wait();
    EXPECT_TRUE(at::equal(wide, at::tensor({-7.f, 5.f, -7.f, 5.f, -7.f, 6.f, -7.f, 6.f}).view({4, 2})));
    at::Tensor expanded = at::full({1}, rank + 1.0).expand({4}), output = column;
    group->reduce_scatter_single(output, expanded)->wait();
    EXPECT_TRUE(at::equal(storage, at::tensor({3.f, -7.f, 3.f, -7.f}).view({2, 2})));
    const std::string error = error_of([&] { all_reduce(group, expanded); });
    EXPECT_THAT(
        error,
        HasSubstr("an output tensor of size (4) is expanded: several of its elements share memory; pass a clone()"));
    // One rank's impossible argument is an error on the other rank too.
    at::Tensor only_here = rank == 1 ? expanded : at::ones({4});
    EXPECT_THAT(error_of([&] { all_reduce(group, only_here); }),
                HasSubstr(rank == 1 ? "pass a clone()" : "'refused allreduce'"));
    EXPECT_EQ(only_here[0].item<float>(), rank == 1 ? 2 : 1);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// Field case 29.
TEST(Backend, RanksThatDisagreeGetTheSameErrorAndGoOn) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    const bool odd = rank == 2;  // ranks 0 and 1 agree with each other
    const auto expect = [&](const std::function<void()>& call, const std::string& agreeing, const std::string& other) {
      const std::string error = error_of(call);
      EXPECT_THAT(error, HasSubstr("trueshard[rank " + std::to_string(rank) + "/3] group '"));
      EXPECT_THAT(error, HasSubstr(odd ? other : agreeing));
    };
    at::Tensor tensor = at::ones({odd ? 6 : 4});
    expect(
        [&] { all_reduce(group, tensor); },
        "this rank runs 'allreduce' but rank 2 runs 'allreduce'; elements is 4 here and 6 on rank 2; all ranks must",
        "this rank runs 'allreduce' but rank 0 runs 'allreduce'; elements is 6 here and 4 on rank 0; all ranks must");
    EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor)));
    at::Tensor typed = odd ? at::ones({4}, at::kInt) : at::ones({4});
    expect([&] { all_reduce(group, typed, ReduceOp::SUM, true); }, "; dtype is float32 here and int32 on rank 2; all",
           "; dtype is int32 here and float32 on rank 0; all");
    at::Tensor four = at::ones({4}), twelve = at::zeros({12});
    expect([&] { odd ? static_cast<void>(group->all_gather_single(twelve, four)->wait()) : all_reduce(group, four); },
           "operation is 'allreduce' here and 'all_gather_into_tensor' on rank 2",
           "operation is 'all_gather_into_tensor' here");
    expect([&] { all_reduce(group, four, odd ? ReduceOp::MAX : ReduceOp::SUM); },
           "; reduction is sum here and max on rank 2; all", "; reduction is max here and sum on rank 0; all");
    c10d::BroadcastOptions options;
    options.rootRank = odd ? 1 : 0;
    std::vector<at::Tensor> list{four};
    expect([&] { group->broadcast(list, options)->wait(); }, "; root is 0 here and 1 on rank 2; all",
           "; root is 1 here and 0 on rank 0; all");
    expect([&] { all_reduce(group, four, c10d::makePreMulSum(odd ? 0.5 : 0.25)); }, "; detail is 0x", "; detail is 0x");
    EXPECT_TRUE(at::equal(four, at::ones({4})));
    std::vector<int64_t> even{2, 2, 2}, uneven{1, 1, 4};
    at::Tensor six = at::ones({6}), out = at::zeros({6});
    expect([&] { group->all_to_all_single(out, six, odd ? uneven : even, even)->wait(); },
           "rank 0 sends 8 bytes to rank 2, which expects 4", "rank 0 sends 8 bytes to rank 2, which expects 4");
    all_reduce(group, four);
    EXPECT_TRUE(at::equal(four, at::full({4}, 3.0f)));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Backend, ImpossibleArgumentsAreNamed) {
  const RankResults results = testing::run_threads(2, [](int rank, const Group& group) {
    at::Tensor four = at::ones({4}), three = at::ones({3}), eight = at::ones({8}), half = at::ones({8}, at::kHalf);
    EXPECT_THAT(error_of([&] { group->all_gather_single(three, four)->wait(); }),
                HasSubstr("all_gather_into_tensor: output 0 is float32 of size (3), expected float32 with 8 elements"));
    EXPECT_THAT(error_of([&] { group->all_gather_single(half, four)->wait(); }),
                HasSubstr("is float16 of size (8), expected float32"));
    EXPECT_THAT(error_of([&] { group->reduce_scatter_single(four, three)->wait(); }),
                HasSubstr("input 0 is float32 of size (3), expected"));
    c10d::BroadcastOptions options;
    options.rootRank = 5;
    std::vector<at::Tensor> list{four};
    EXPECT_THAT(error_of([&] { group->broadcast(list, options)->wait(); }),
                HasSubstr("root is rank 5, expected 0 to 1"));
    EXPECT_THAT(error_of([&] { all_reduce(group, four, ReduceOp::BAND); }),
                HasSubstr("'band' of float32 is not defined"));
    at::Tensor floats8 = at::ones({4}).to(at::kFloat8_e5m2);
    EXPECT_THAT(error_of([&] { all_reduce(group, floats8); }), HasSubstr("is not supported; reduce float16, bfloat16"));
    std::vector<int64_t> none, wrong{1, 2};
    at::Tensor five = at::ones({5}), five_out = at::ones({5});
    EXPECT_THAT(error_of([&] { group->all_to_all_single(five_out, five, none, none)->wait(); }),
                HasSubstr("5 rows, not a multiple of 2 ranks"));
    EXPECT_THAT(error_of([&] { group->all_to_all_single(five_out, five, wrong, wrong)->wait(); }),
                HasSubstr("2 numbers that add up to its 5 rows"));
    at::Tensor sparse = at::eye(3).to_sparse();
    EXPECT_THAT(error_of([&] {
                  std::vector<at::Tensor> one{sparse};
                  group->getBackend(c10::DeviceType::CPU)->allreduce(one, all_reduce_options(ReduceOp::SUM))->wait();
                }),
                HasSubstr("layout Sparse, expected a dense"));
    all_reduce(group, eight);
    EXPECT_EQ(eight[rank].item<float>(), 2);
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Backend, ComplexSumsAreSumsOfPairs) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    at::Tensor tensor = at::complex(at::full({2}, rank + 1.0), at::full({2}, -2.0f));
    all_reduce(group, tensor);
    EXPECT_TRUE(at::equal(tensor, at::complex(at::full({2}, 6.0f), at::full({2}, -6.0f))));
  });
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Backend, AsynchronousWorkCompletesInOrderWithAFuture) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(at::full({1000}, static_cast<float>(rank + i)));
      std::vector<at::Tensor> list{tensors.back()};
      works.push_back(group->allreduce(list, all_reduce_options(ReduceOp::SUM)));
    }
    at::Tensor last = at::ones({1});
    all_reduce(group, last);  // synchronous, behind twenty others
    EXPECT_EQ(last.item<float>(), 3);
    for (int i = 0; i < 20; ++i) {
      works[static_cast<size_t>(i)]->wait();
      EXPECT_TRUE(works[static_cast<size_t>(i)]->isCompleted());
      EXPECT_EQ(tensors[static_cast<size_t>(i)][7].item<float>(), static_cast<float>(3 + 3 * i));
      const auto future = works[static_cast<size_t>(i)]->getFuture();
      future->wait();
      EXPECT_TRUE(future->value().toTensorVector()[0].is_same(tensors[static_cast<size_t>(i)]));
    }
    std::vector<at::Tensor> bad{at::ones({2}, at::kLong)};
    auto failed = group->allreduce(bad, all_reduce_options(ReduceOp::AVG));
    for (int i = 0; i < 2; ++i) EXPECT_THAT(error_of([&] { failed->wait(); }), HasSubstr("'avg' of int64"));
    EXPECT_TRUE(failed->exception() != nullptr);
    EXPECT_THROW(failed->getFuture()->waitAndThrow(), std::exception);
  });
  ASSERT_TRUE(results.ok()) << results;
}

// 200 seeds of delays and poisoned buffers on small collectives.
TEST(Backend, ChaosChangesNoBits) {
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      if (rank == 0) observe::set_chaos_for_testing({0.2, true, seed});
      const auto leaves = leaves_of(3, 9, at::kBFloat16, seed);
      at::Tensor mine = leaves[static_cast<size_t>(rank)].clone();
      all_reduce(group, mine, ReduceOp::AVG, seed % 2 == 0);
      EXPECT_TRUE(same_bits(mine, reference(leaves, ReduceOp::AVG))) << seed;
      at::Tensor input = leaves[static_cast<size_t>(rank)], output = at::empty({3}, at::kBFloat16),
                 whole = at::empty({27}, at::kBFloat16);
      group->reduce_scatter_single(output, input)->wait();
      EXPECT_TRUE(same_bits(output, reference(leaves, ReduceOp::SUM).narrow(0, 3 * rank, 3))) << seed;
      group->all_gather_single(whole, input)->wait();
      EXPECT_TRUE(same_bits(whole, at::cat(leaves))) << seed;
      std::vector<at::Tensor> list{mine};
      group->broadcast(list)->wait();
    }
  });
  observe::set_chaos_for_testing({});
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Backend, LargeArraysUnderChaosAreStillRight) {
  const auto leaves = leaves_of(3, 700001, at::kFloat, 5);
  const at::Tensor expected = reference(leaves, ReduceOp::SUM);
  observe::set_chaos_for_testing({2, true, 5});
  const RankResults results = testing::run_threads(3, [&](int rank, const Group& group) {
    at::Tensor mine = leaves[static_cast<size_t>(rank)].clone();
    all_reduce(group, mine);
    EXPECT_TRUE(same_bits(mine, expected));
  });
  observe::set_chaos_for_testing({});
  ASSERT_TRUE(results.ok()) << results;
}

TEST(Backend, AnotherBackendsGroupIsRefusedByName) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 1);
  EXPECT_THAT(error_of([&] { transport_of(*group); }),
              HasSubstr("expected 'trueshard'; make it with trueshard::init_process_group()"));
  const Group ours = init_process_group();
  EXPECT_EQ(transport_of(*ours)->size(), 1);
  EXPECT_EQ(ours->getBackend(c10::DeviceType::CPU)->getBackendName(), "trueshard");
}

// Field case 31, opt-in: set TRUESHARD_TEST_HUGE=1 (about 9 GB of memory).
TEST(Backend, MoreThanTwoToThe31ElementsAreReducedToTheLast) {
  if (std::getenv("TRUESHARD_TEST_HUGE") == nullptr) GTEST_SKIP() << "set TRUESHARD_TEST_HUGE=1; needs 9 GB of memory";
  const RankResults results = testing::run_threads(3, [](int rank, const Group& group) {
    const int64_t n = (int64_t{1} << 31) + 7;
    at::Tensor tensor = at::full({n}, rank + 1, at::kChar);
    all_reduce(group, tensor);
    for (const int64_t i : {int64_t{0}, n / 2, n - 8, n - 1}) EXPECT_EQ(tensor[i].item<int>(), 6) << i;
  });
  ASSERT_TRUE(results.ok()) << results;
}

}  // namespace
}  // namespace trueshard::comm
