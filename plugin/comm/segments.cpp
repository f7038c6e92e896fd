// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/segments.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include <c10/util/Exception.h>

namespace trueshard::comm {
namespace {

constexpr char kFolder[] = "/dev/shm";

std::string reason() { return std::strerror(errno); }

class FileGuard {
 public:
  explicit FileGuard(int file) : file_(file) {}
  ~FileGuard() {
    if (file_ >= 0) ::close(file_);
  }
  FileGuard(const FileGuard&) = delete;
  FileGuard& operator=(const FileGuard&) = delete;
  FileGuard(FileGuard&& other) noexcept : file_(other.take()) {}
  int get() const { return file_; }
  int take() {
    const int file = file_;
    file_ = -1;
    return file;
  }

 private:
  int file_;
};

std::byte* map_shared(int file, size_t bytes, int extra_flags) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | extra_flags, file, 0);
  TORCH_CHECK(data != MAP_FAILED, "mapping ", bytes, " bytes of shared memory failed: ", reason());
  return static_cast<std::byte*>(data);
}

uint64_t inode_of(int file) {
  struct stat status {};
  TORCH_CHECK(::fstat(file, &status) == 0, "reading the state of a shared segment failed: ", reason());
  return status.st_ino;
}

FileGuard make_memfd(size_t bytes) {
  FileGuard file(::memfd_create("trueshard", MFD_CLOEXEC));
  TORCH_CHECK(file.get() >= 0, "memfd_create failed: ", reason());
  TORCH_CHECK(::ftruncate(file.get(), static_cast<off_t>(bytes)) == 0, "a shared segment of ", bytes,
              " bytes could not be made: ", reason());
  return file;
}

class ThreadSegments final : public Segments {
 public:
  const char* kind() const override { return "threads"; }
  bool closes_alone() const override { return false; }
  std::shared_ptr<Mapping> create(size_t bytes, SegmentTicket* ticket) override {
    std::shared_ptr<Mapping> mapping;
    if (ticket->keep_file) {
      FileGuard file = make_memfd(bytes);
      std::byte* data = map_shared(file.get(), bytes, 0);
      mapping = std::make_shared<Mapping>(data, bytes, file.take());
    } else {
      mapping = std::make_shared<Mapping>(map_shared(-1, bytes, MAP_ANONYMOUS), bytes, -1);
    }
    const std::lock_guard<std::mutex> lock(list().mutex);
    ticket->pid = getpid();
    ticket->number = ++list().last;
    ticket->bytes = bytes;
    list().entries[ticket->number] = mapping;
    return mapping;
  }
  std::shared_ptr<Mapping> open(const SegmentTicket& ticket) override {
    const std::lock_guard<std::mutex> lock(list().mutex);
    const auto found = list().entries.find(ticket.number);
    TORCH_CHECK(ticket.pid == getpid() && found != list().entries.end(),
                "the rank that made the block has left already");
    return found->second;
  }
  void release(const SegmentTicket& ticket) noexcept override {
    const std::lock_guard<std::mutex> lock(list().mutex);
    list().entries.erase(ticket.number);
  }

 private:
  struct List {
    std::mutex mutex;
    std::map<int64_t, std::shared_ptr<Mapping>> entries;
    int64_t last = 0;
  };
  static List& list() {
    static auto* const the_list = new List();  // outlives every static that may still hold a transport
    return *the_list;
  }
};

class MemfdSegments final : public Segments {
 public:
  const char* kind() const override { return "shared memory"; }
  std::shared_ptr<Mapping> create(size_t bytes, SegmentTicket* ticket) override {
    FileGuard file = make_memfd(bytes);
    FileGuard kept(ticket->keep_file ? ::fcntl(file.get(), F_DUPFD_CLOEXEC, 0) : -1);
    TORCH_CHECK(!ticket->keep_file || kept.get() >= 0, "duplicating a descriptor failed: ", reason());
    std::byte* data = map_shared(file.get(), bytes, 0);
    auto mapping = std::make_shared<Mapping>(data, bytes, kept.take());
    ticket->pid = getpid();
    ticket->inode = inode_of(file.get());
    ticket->bytes = bytes;
    ticket->number = file.take();
    return mapping;
  }
  std::shared_ptr<Mapping> open(const SegmentTicket& ticket) override {
    const std::string path = "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.number);
    FileGuard file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    TORCH_CHECK(file.get() >= 0, "opening ", path, " failed: ", reason());
    TORCH_CHECK(inode_of(file.get()) == ticket.inode, path, " is no longer the segment that was announced");
    std::byte* data = map_shared(file.get(), ticket.bytes, 0);
    return std::make_shared<Mapping>(data, ticket.bytes, ticket.keep_file ? file.take() : -1);
  }
  void release(const SegmentTicket& ticket) noexcept override { ::close(static_cast<int>(ticket.number)); }
};

// The creator holds a shared lock on each file for as long as it has a name; a named file without one was left by a
// process that was killed in the short time before all ranks had mapped it, and is swept away here.
class FileSegments final : public Segments {
 public:
  FileSegments() { sweep(); }
  const char* kind() const override { return "shared memory"; }
  std::shared_ptr<Mapping> create(size_t bytes, SegmentTicket* ticket) override {
    for (int attempt = 0; attempt < 100; ++attempt) {
      uint64_t random[2] = {};
      TORCH_CHECK(::getrandom(random, sizeof random, 0) == static_cast<ssize_t>(sizeof random), "getrandom failed");
      std::snprintf(ticket->file, sizeof ticket->file, "%s%016llx%016llx", prefix().c_str(),
                    static_cast<unsigned long long>(random[0]), static_cast<unsigned long long>(random[1]));
      const std::string path = std::string(kFolder) + "/" + ticket->file;
      FileGuard file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
      if (file.get() < 0 && errno == EEXIST) continue;
      TORCH_CHECK(file.get() >= 0, "making ", path, " failed: ", reason());
      struct stat status {};
      if (::flock(file.get(), LOCK_SH | LOCK_NB) != 0 || ::fstat(file.get(), &status) != 0 || status.st_nlink == 0) {
        continue;  // swept between open and lock
      }
      if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
        const std::string why = reason();
        ::unlink(path.c_str());
        TORCH_CHECK(false, "a shared segment of ", bytes, " bytes in ", kFolder, " could not be made: ", why);
      }
      ticket->pid = getpid();
      ticket->inode = status.st_ino;
      ticket->bytes = bytes;
      std::byte* data = map_shared(file.get(), bytes, 0);
      return std::make_shared<Mapping>(data, bytes, file.take());
    }
    TORCH_CHECK(false, "no free name for a shared segment in ", kFolder);
  }
  std::shared_ptr<Mapping> open(const SegmentTicket& ticket) override {
    const std::string path = std::string(kFolder) + "/" + ticket.file;
    FileGuard file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    TORCH_CHECK(file.get() >= 0, "opening ", path, " failed: ", reason());
    TORCH_CHECK(inode_of(file.get()) == ticket.inode, path, " is no longer the segment that was announced");
    std::byte* data = map_shared(file.get(), ticket.bytes, 0);
    return std::make_shared<Mapping>(data, ticket.bytes, file.take());
  }
  void release(const SegmentTicket& ticket) noexcept override {
    ::unlink((std::string(kFolder) + "/" + ticket.file).c_str());
  }

 private:
  static std::string prefix() { return "trueshard-" + std::to_string(geteuid()) + "-"; }
  static void sweep() noexcept {
    DIR* folder = ::opendir(kFolder);
    if (folder == nullptr) return;
    const std::string mine = prefix();
    while (const dirent* entry = ::readdir(folder)) {
      if (std::strncmp(entry->d_name, mine.c_str(), mine.size()) != 0) continue;
      const FileGuard file(::openat(::dirfd(folder), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW));
      if (file.get() >= 0 && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlinkat(::dirfd(folder), entry->d_name, 0);
    }
    ::closedir(folder);
  }
};

}  // namespace

Mapping::~Mapping() {
  ::munmap(data_, bytes_);
  close_file();
}

void Mapping::close_file() noexcept {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

std::string SegmentTicket::encode() const {
  std::ostringstream out;
  out << pid << ' ' << number << ' ' << inode << ' ' << bytes << ' ' << keep_file << ' '
      << (file[0] == '\0' ? "-" : file);
  return out.str();
}

SegmentTicket SegmentTicket::decode(const std::string& text) {
  std::istringstream in(text);
  SegmentTicket ticket;
  std::string name;
  in >> ticket.pid >> ticket.number >> ticket.inode >> ticket.bytes >> ticket.keep_file >> name;
  TORCH_CHECK(static_cast<bool>(in) && name.size() < sizeof ticket.file, "trueshard: malformed segment '", text,
              "'; all ranks must run the same version of trueshard");
  if (name != "-") std::strncpy(ticket.file, name.c_str(), sizeof ticket.file - 1);
  return ticket;
}

std::unique_ptr<Segments> thread_segments() { return std::make_unique<ThreadSegments>(); }
std::unique_ptr<Segments> memfd_segments() { return std::make_unique<MemfdSegments>(); }
std::unique_ptr<Segments> file_segments() { return std::make_unique<FileSegments>(); }

}  // namespace trueshard::comm
