// SPDX-License-Identifier: BSD-3-Clause
// Role: a rank's own look at a block that ranks share. Reading shows what is written to the block; writing gives the
// rank a copy of the page, which nobody else sees and which shows nothing new until drop(). So all ranks of a host have
// one physical copy of what none of them has written to. Invariants: I1 written() says yes for every byte that was
// written through the view since the last drop(), however it was written (raw pointers included); and for other bytes
// of the same pages, or for all where the kernel does not answer. Shapes: bytes. Threads: one at a time; reads of
// data() at any time. Errors: c10::Error from the constructor only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace trueshard::comm {

class PrivateView {
 public:
  // The kernel says which pages of a private mapping are copies (Linux 3.5 and later, /proc mounted). Tried once.
  static bool works() noexcept;

  // Shows `bytes` bytes of the file, whose descriptor is not needed any more afterwards.
  PrivateView(int file, size_t bytes);
  ~PrivateView();
  PrivateView(const PrivateView&) = delete;
  PrivateView& operator=(const PrivateView&) = delete;
  std::byte* data() const { return data_; }
  // Looks which pages are copies now, for written().
  void look() noexcept;
  bool written(size_t begin, size_t end) const noexcept;  // when look() was called last
  // Copies go, and what they held: the view shows the block again. Memory that was locked since (mlock) is unlocked.
  void drop() noexcept;

 private:
  std::byte* data_;
  size_t bytes_;
  std::vector<uint64_t> entries_;  // a page each, as the kernel describes it
};

}  // namespace trueshard::comm
