// SPDX-License-Identifier: BSD-3-Clause
// The c10d operations beyond their arithmetic: empty and strided tensors, disagreement, order, timing and size.
#include "plugin/comm/backend.h"

#include "plugin/observe/trace.h"
#include "tests/comm/reference.h"

namespace trueshard::comm {
namespace {

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
    EXPECT_THAT(error_of([&] {  // only all-reduce takes it
                  std::vector<at::Tensor> one{sparse};
                  group->getBackend(c10::DeviceType::CPU)->broadcast(one, c10d::BroadcastOptions())->wait();
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
