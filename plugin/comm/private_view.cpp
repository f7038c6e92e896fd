// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/private_view.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <c10/util/Exception.h>

namespace trueshard::comm {
namespace {

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

// Of an entry of /proc/self/pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst): bit 63 the page is in memory, 62
// it is swapped out, 61 it belongs to a file or is shared. What was never touched has none of them.
bool is_copy(uint64_t entry) { return (entry >> 62) != 0 && (entry >> 61 & 1) == 0; }

// Opened once in each process: one that runs out of descriptors, or gives up its rights, can still read it. What a
// child inherits is its parent's table.
int page_table() noexcept {
  static std::atomic<int> file{-1};
  static std::atomic<pid_t> owner{0};
  if (owner.load(std::memory_order_acquire) != ::getpid()) {  // threads may both open it: either will do
    file.store(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    owner.store(::getpid(), std::memory_order_release);
  }
  return file.load();
}

bool read_entries(const std::byte* data, size_t pages, uint64_t* entries) noexcept {
  size_t done = 0;
  const size_t wanted = pages * sizeof *entries;
  const auto start = reinterpret_cast<uintptr_t>(data) / page_bytes() * sizeof *entries;
  while (done < wanted) {
    const ssize_t got =
        ::pread(page_table(), reinterpret_cast<char*>(entries) + done, wanted - done, static_cast<off_t>(start + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  return done == wanted;
}

bool try_out() {
  const size_t page = page_bytes();
  const int file = ::memfd_create("trueshard", MFD_CLOEXEC);
  if (file < 0) return false;
  bool works = ::ftruncate(file, static_cast<off_t>(3 * page)) == 0;
  void* block = works ? ::mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  if (works && block != MAP_FAILED) {
    PrivateView view(file, 3 * page);
    const auto value = [](const void* base, size_t at) -> volatile char& {
      return *(static_cast<volatile char*>(const_cast<void*>(base)) + at);
    };
    value(block, 0) = 1;
    value(view.data(), page) = 2;
    works = value(view.data(), 0) == 1 && value(block, page) == 0;
    value(block, 0) = 3;
    uint64_t entries[3] = {};
    works &=
        read_entries(view.data(), 3, entries) && !is_copy(entries[0]) && is_copy(entries[1]) && !is_copy(entries[2]);
    if (works) {
      view.drop();
      works = value(view.data(), 0) == 3 && value(view.data(), page) == 0;
    }
    ::munmap(block, 3 * page);
  } else {
    works = false;
  }
  ::close(file);
  return works;
}

}  // namespace

bool PrivateView::works() noexcept {
  static const bool result = [] {
    try {
      return try_out();
    } catch (const std::exception&) {
      return false;
    }
  }();
  return result;
}

PrivateView::PrivateView(int file, size_t bytes) : bytes_(bytes), entries_((bytes + page_bytes() - 1) / page_bytes()) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
  TORCH_CHECK(data != MAP_FAILED, "mapping ", bytes,
              " bytes of shared memory privately failed: ", std::strerror(errno));
  data_ = static_cast<std::byte*>(data);
}

PrivateView::~PrivateView() { ::munmap(data_, bytes_); }

void PrivateView::look() noexcept {
  constexpr uint64_t kCopy = uint64_t{1} << 63;
  if (!read_entries(data_, entries_.size(), entries_.data())) std::fill(entries_.begin(), entries_.end(), kCopy);
}

bool PrivateView::written(size_t begin, size_t end) const noexcept {
  if (begin >= end) return false;
  const size_t last = std::min((end + page_bytes() - 1) / page_bytes(), entries_.size());
  return std::any_of(entries_.begin() + static_cast<ptrdiff_t>(std::min(begin / page_bytes(), last)),
                     entries_.begin() + static_cast<ptrdiff_t>(last), is_copy);
}

void PrivateView::drop() noexcept {
  look();
  for (size_t page = 0; page < entries_.size();) {
    if (!is_copy(entries_[page])) {
      ++page;
      continue;
    }
    size_t end = page;
    while (end < entries_.size() && is_copy(entries_[end])) entries_[end++] = 0;
    std::byte* begin = data_ + page * page_bytes();
    const size_t bytes = (end - page) * page_bytes();
    if (::madvise(begin, bytes, MADV_DONTNEED) != 0) {  // locked pages can not be given back
      ::munlock(begin, bytes);
      ::madvise(begin, bytes, MADV_DONTNEED);
    }
    page = end;
  }
}

}  // namespace trueshard::comm
