// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/private_view.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
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

bool read_entries(const std::byte* data, size_t pages, uint64_t* entries) {
  const int file = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  size_t done = 0;
  const size_t wanted = pages * sizeof *entries;
  const auto start = reinterpret_cast<uintptr_t>(data) / page_bytes() * sizeof *entries;
  while (done < wanted) {
    const ssize_t got =
        ::pread(file, reinterpret_cast<char*>(entries) + done, wanted - done, static_cast<off_t>(start + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  ::close(file);
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

bool PrivateView::works() {
  static const bool result = try_out();
  return result;
}

PrivateView::PrivateView(int file, size_t bytes) : bytes_(bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
  TORCH_CHECK(data != MAP_FAILED, "mapping ", bytes,
              " bytes of shared memory privately failed: ", std::strerror(errno));
  data_ = static_cast<std::byte*>(data);
}

PrivateView::~PrivateView() { ::munmap(data_, bytes_); }

void PrivateView::look() {
  entries_.resize((bytes_ + page_bytes() - 1) / page_bytes());
  TORCH_CHECK(read_entries(data_, entries_.size(), entries_.data()),
              "reading /proc/self/pagemap failed: ", std::strerror(errno));
}

bool PrivateView::written(size_t begin, size_t end) const {
  if (begin >= end) return false;
  const size_t last = std::min((end + page_bytes() - 1) / page_bytes(), entries_.size());
  return std::any_of(entries_.begin() + static_cast<ptrdiff_t>(std::min(begin / page_bytes(), last)),
                     entries_.begin() + static_cast<ptrdiff_t>(last), is_copy);
}

void PrivateView::drop() {
  look();
  for (size_t page = 0; page < entries_.size();) {
    if (!is_copy(entries_[page])) {
      ++page;
      continue;
    }
    size_t end = page;
    while (end < entries_.size() && is_copy(entries_[end])) entries_[end++] = 0;
    TORCH_CHECK(::madvise(data_ + page * page_bytes(), (end - page) * page_bytes(), MADV_DONTNEED) == 0,
                "giving back copied pages failed: ", std::strerror(errno));
    page = end;
  }
}

}  // namespace trueshard::comm
