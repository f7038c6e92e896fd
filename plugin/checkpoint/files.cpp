// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

namespace trueshard::checkpoint {

namespace {

std::atomic<WriteObserver> write_observer{nullptr};

[[noreturn]] void fail(const char* what, const std::string& path, int error = errno) {
  throw FormatError(std::string("cannot ") + what + " '" + path + "': " + system_reason(error));
}

template <typename Call>
auto retry(const Call& call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

File checked_regular(int descriptor, const std::string& path) {
  if (descriptor < 0) {
    if (errno == ELOOP) throw FormatError("'" + path + "' is a symbolic link; a checkpoint holds plain files only");
    fail("open", path);
  }
  File file(descriptor, path);
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) fail("look at", path);
  if (!S_ISREG(status.st_mode)) throw FormatError("'" + path + "' is not a regular file");
  return file;
}

}  // namespace

std::string system_reason(int error) { return std::generic_category().message(error); }

void set_write_observer(WriteObserver observer) { write_observer.store(observer); }
void note_write(const char* step) {
  if (const auto observer = write_observer.load(std::memory_order_relaxed)) observer(step);
}
IoCounters& io_counters() {
  static IoCounters counters;
  return counters;
}

void require_plain_name(const std::string& name, const std::string& where) {
  const bool plain = !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
                     name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
  if (plain) return;
  std::string shown = name.substr(0, 300);
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20) c = '?';
  }
  throw FormatError(where + ": '" + shown + "' is not the name of a file inside the folder");
}

// ---- File ----------------------------------------------------------------------------------------------------------

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}
File::File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}
File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(path_, other.path_);
  return *this;
}

int64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("look at", path_);
  return status.st_size;
}

void File::read(void* data, int64_t bytes, int64_t offset) const {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = retry([&] { return ::pread(descriptor_, at, static_cast<size_t>(bytes), offset); });
    if (count < 0) fail("read", path_);
    if (count == 0)
      throw FormatError("'" + path_ + "' ends at byte " + std::to_string(offset) + ", " + std::to_string(bytes) +
                        " bytes too early; it is truncated");
    at += count, offset += count, bytes -= count;
    io_counters().bytes_read.fetch_add(count, std::memory_order_relaxed);
  }
}

void File::write(const void* data, int64_t bytes, int64_t offset) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    note_write("write");
    const ssize_t count = retry([&] { return ::pwrite(descriptor_, at, static_cast<size_t>(bytes), offset); });
    if (count <= 0) fail("write", path_, count == 0 ? ENOSPC : errno);
    at += count, offset += count, bytes -= count;
    io_counters().bytes_written.fetch_add(count, std::memory_order_relaxed);
  }
}

void File::reserve(int64_t bytes) {
  note_write("reserve");
  if (bytes > 0 && retry([&] { return ::fallocate(descriptor_, 0, 0, bytes); }) != 0) {
    if (errno != EOPNOTSUPP && errno != ENOSYS) fail("reserve space for", path_);
  }
  if (retry([&] { return ::ftruncate(descriptor_, bytes); }) != 0) fail("set the size of", path_);
}

void File::start_writeback(int64_t offset, int64_t bytes) {
  ::sync_file_range(descriptor_, offset, bytes, SYNC_FILE_RANGE_WRITE);  // a hint: its result does not matter
}

void File::sync() {
  note_write("sync");
  if (::fsync(descriptor_) != 0) fail("sync", path_);  // after an error the data may be gone: never tried again
}

void File::will_read(int64_t offset, int64_t bytes) const {
  ::posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_WILLNEED);
}

// ---- Folder --------------------------------------------------------------------------------------------------------

Folder Folder::open(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail("open the folder", path);
  return Folder(descriptor, path);
}
Folder::~Folder() {
  if (descriptor_ >= 0) ::close(descriptor_);
}
Folder::Folder(Folder&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

std::vector<std::string> Folder::names() const {
  const int copy = ::openat(descriptor_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) fail("list the folder", path_);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(copy), ::closedir);
  if (!stream) fail("list the folder", path_);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}
bool Folder::contains(const std::string& name) const {
  return ::faccessat(descriptor_, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}
File Folder::open_file(const std::string& name) const {
  require_plain_name(name, path_);
  // Not blocking: a pipe in a file's place is then refused and not waited for.
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  return checked_regular(::openat(descriptor_, name.c_str(), kFlags), path_ + "/" + name);
}
File Folder::open_for_writing(const std::string& name) const {
  require_plain_name(name, path_);
  return checked_regular(::openat(descriptor_, name.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK),
                         path_ + "/" + name);
}
File Folder::create(const std::string& name) const {
  require_plain_name(name, path_);
  note_write("create");
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  return checked_regular(::openat(descriptor_, name.c_str(), kFlags, 0666), path_ + "/" + name);
}
void Folder::sync() const {
  note_write("sync folder");
  if (::fsync(descriptor_) != 0) fail("sync the folder", path_);
}

File open_regular(const std::string& path) {
  return checked_regular(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), path);
}

}  // namespace trueshard::checkpoint
