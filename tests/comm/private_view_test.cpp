// SPDX-License-Identifier: BSD-3-Clause
// One physical copy for all ranks until somebody writes, and writes that stay where they were made.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "plugin/comm/backend.h"
#include "plugin/comm/private_view.h"
#include "tests/support/ranks.h"

namespace trueshard::comm {
namespace {

using trueshard::testing::Rank;
using trueshard::testing::run_process_ranks;
using trueshard::testing::run_thread_ranks;

const size_t kPage = static_cast<size_t>(::sysconf(_SC_PAGESIZE));

struct Block {  // eight pages that two views look at
  int file = ::memfd_create("test", MFD_CLOEXEC);
  size_t bytes = 8 * kPage;
  char* shared = nullptr;
  Block() {
    EXPECT_EQ(::ftruncate(file, static_cast<off_t>(bytes)), 0);
    shared = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  }
  ~Block() {
    ::munmap(shared, bytes);
    ::close(file);
  }
};
char* chars(PrivateView& view) { return reinterpret_cast<char*>(view.data()); }

TEST(PrivateView, ShowsTheBlockUntilItIsWrittenTo) {
  if (!PrivateView::works()) GTEST_SKIP() << "this system does not say which pages were written";
  Block block;
  PrivateView one(block.file, block.bytes), two(block.file, block.bytes);
  block.shared[3 * kPage] = 'a';
  EXPECT_EQ(chars(one)[3 * kPage], 'a');
  chars(one)[3 * kPage + 1] = 'b';
  EXPECT_EQ(block.shared[3 * kPage + 1], 0);
  EXPECT_EQ(chars(two)[3 * kPage + 1], 0);
  block.shared[3 * kPage] = 'c';
  EXPECT_EQ(chars(one)[3 * kPage], 'a') << "a copied page stands still";
  EXPECT_EQ(chars(two)[3 * kPage], 'c');
  one.drop();
  EXPECT_EQ(chars(one)[3 * kPage], 'c');
  EXPECT_EQ(chars(one)[3 * kPage + 1], 0);
}

TEST(PrivateView, KnowsEveryWriteThroughIt) {
  if (!PrivateView::works()) GTEST_SKIP() << "this system does not say which pages were written";
  Block block;
  PrivateView view(block.file, block.bytes);
  std::memset(block.shared, 7, block.bytes);
  std::set<size_t> written;
  for (const size_t page : {6, 0, 7, 3}) {
    if (page == 3) static_cast<void>(*static_cast<volatile char*>(chars(view) + 2 * kPage));  // read only
    chars(view)[page * kPage + 5] = 1;
    written.insert(page);
    view.look();
    for (size_t p = 0; p < 8; ++p) {
      EXPECT_EQ(view.written(p * kPage, p * kPage + 1), written.count(p) == 1) << p;
      EXPECT_EQ(view.written(p * kPage + kPage - 1, p * kPage + kPage), written.count(p) == 1) << p;
    }
  }
  EXPECT_FALSE(view.written(kPage, 3 * kPage));
  EXPECT_TRUE(view.written(kPage, 3 * kPage + 1));
  EXPECT_FALSE(view.written(5, 5));
  view.drop();
  view.look();
  EXPECT_FALSE(view.written(0, block.bytes));
}

// Rank 0's block, seen by all ranks, over both transports.
std::string look_at_the_first_ranks_block(Rank& rank) {
  const auto group = rank.group();
  auto transport = transport_of(*group);
  const size_t bytes = rank.rank == 0 ? 20000 : 0;
  const auto region = transport->allocate("one copy", bytes, Views::kPrivate);
  const auto view = region->view(0);
  auto* mine = chars(*view) + region->view_offset(0);
  auto* common = reinterpret_cast<char*>(region->data(0));
  common[rank.rank * 5000] = static_cast<char>('a' + rank.rank);
  group->barrier()->wait();
  for (int r = 0; r < transport->size(); ++r) EXPECT_EQ(mine[r * 5000], 'a' + r);
  mine[19999] = static_cast<char>('A' + rank.rank);
  group->barrier()->wait();
  EXPECT_EQ(common[19999], 0);
  EXPECT_EQ(mine[19999], 'A' + rank.rank);
  return {};
}

TEST(PrivateView, OfARanksBlockIsEachRanksOwn) {
  const auto processes = run_process_ranks(3, look_at_the_first_ranks_block);
  EXPECT_TRUE(processes.ok()) << processes;
  const auto threads = run_thread_ranks(3, look_at_the_first_ranks_block);
  EXPECT_TRUE(threads.ok()) << threads;
}

}  // namespace
}  // namespace trueshard::comm
