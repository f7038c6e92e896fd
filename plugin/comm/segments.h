// SPDX-License-Identifier: BSD-3-Clause
// Role: blocks of zeroed memory that one rank makes and the others open, in three ways: between threads of one process;
// memfd between processes (nameless, opened through /proc/<pid>/fd, so that nothing can stay behind after kill -9);
// files in /dev/shm where /proc cannot be used (another pid namespace), unlinked as soon as all ranks have them mapped.
// Invariants: I1 only the owner's user can open them. I2 pages that nobody touches cost nothing. I3 open() either gives
// the very segment that the ticket names or throws: a number that was reused since is noticed. Threads: all functions
// may be called from any thread. Errors: c10::Error with the system's reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace trueshard::comm {

class Mapping {  // a mapped block; unmapped when the last owner lets go
 public:
  Mapping(std::byte* data, size_t bytes, int file) : data_(data), bytes_(bytes), file_(file) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_; }  // -1, or a descriptor kept for locks, or until private views are made
  void close_file() noexcept;

 private:
  std::byte* data_;
  size_t bytes_;
  int file_;
};

struct SegmentTicket {  // what a peer needs to open a segment; plain data, lives in shared memory too
  int64_t pid = 0;
  int64_t number = 0;  // descriptor, or number in the process's own list
  uint64_t inode = 0;
  uint64_t bytes = 0;
  bool keep_file = false;  // mappings keep their descriptor until close_file()
  char file[64] = {};
  std::string encode() const;
  static SegmentTicket decode(const std::string& text);
};

class Segments {
 public:
  virtual ~Segments() = default;
  virtual const char* kind() const = 0;
  // Each open() gives a mapping of its own (else all ranks have the maker's).
  virtual bool closes_alone() const { return true; }
  // Fills the ticket in; its keep_file is the caller's wish.
  virtual std::shared_ptr<Mapping> create(size_t bytes, SegmentTicket* ticket) = 0;
  virtual std::shared_ptr<Mapping> open(const SegmentTicket& ticket) = 0;
  // The owner's call once all peers have opened the segment, or nobody will any more.
  virtual void release(const SegmentTicket& ticket) noexcept = 0;
};

std::unique_ptr<Segments> thread_segments();
std::unique_ptr<Segments> memfd_segments();
std::unique_ptr<Segments> file_segments();

}  // namespace trueshard::comm
