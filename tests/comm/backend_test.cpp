// SPDX-License-Identifier: BSD-3-Clause
// The c10d operations against serial references written with torch's own element-wise arithmetic.
#include "plugin/comm/backend.h"
#include "tests/comm/reference.h"

namespace trueshard::comm {
namespace {

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

}  // namespace
}  // namespace trueshard::comm
