// SPDX-License-Identifier: BSD-3-Clause
// Role: files and folders of a checkpoint: every system call that reads or changes them.
// Invariants: I1 names inside a folder are plain names, opened relative to the folder and never through a symbolic
// link. I2 only regular files are opened. I3 before each call that changes the disk the observer is told, so that a
// test can end the process there. Threads: a File may be used from several threads for disjoint ranges.
// Errors: FormatError with the path and the system's reason.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plugin/checkpoint/dtype.h"

namespace trueshard::checkpoint {

class File {
 public:
  File(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const;
  void read(void* data, int64_t bytes, int64_t offset) const;  // all of it, or an error
  void write(const void* data, int64_t bytes, int64_t offset);
  void reserve(int64_t bytes);                          // the file's size; disk space where the file system can
  void start_writeback(int64_t offset, int64_t bytes);  // a hint
  void sync();
  // Says that [offset, offset + bytes) will be read in this order soon; a hint.
  void will_read(int64_t offset, int64_t bytes) const;

 private:
  int descriptor_;
  std::string path_;
};

class Folder {
 public:
  static Folder open(const std::string& path);  // the path itself may lead through links
  ~Folder();
  Folder(Folder&& other) noexcept;
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const;
  File open_file(const std::string& name) const;
  File open_for_writing(const std::string& name) const;  // made by create()
  File create(const std::string& name) const;            // must not exist
  void sync() const;

 private:
  Folder(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  int descriptor_;
  std::string path_;
};

// Throws unless it is the name of one file: no slash, not "." or "..", at most 255 bytes.
void require_plain_name(const std::string& name, const std::string& where);
File open_regular(const std::string& path);  // any path
std::string system_reason(int error);

// Told the name of each step that changes the disk, before it happens; null: nobody. For tests.
using WriteObserver = void (*)(const char* step);
void set_write_observer(WriteObserver observer);
void note_write(const char* step);

struct IoCounters {
  std::atomic<int64_t> bytes_read{0}, bytes_written{0};
};
IoCounters& io_counters();  // of this process

}  // namespace trueshard::checkpoint
