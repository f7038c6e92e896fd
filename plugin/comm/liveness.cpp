// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace trueshard::comm {

Liveness::Liveness(const std::vector<Identity>& ranks, int self)
    : peers_(std::make_unique<Peer[]>(ranks.size())), size_(static_cast<int>(ranks.size())), self_(self) {
  lock_may_serve_.assign(ranks.size(), false);
  const Identity& me = ranks[static_cast<size_t>(self)];
  for (int r = 0; r < size_; ++r) {
    const Identity& identity = ranks[static_cast<size_t>(r)];
    Peer& peer = peers_[static_cast<size_t>(r)];
    if (identity.same_process(me)) continue;  // between threads: always alive
    // A lock belongs to a whole process: it says nothing about one of several ranks in it.
    lock_may_serve_[static_cast<size_t>(r)] = std::count_if(ranks.begin(), ranks.end(), [&](const Identity& other) {
                                                return other.same_process(identity);
                                              }) == 1;
    if (identity.pid_namespace != me.pid_namespace) continue;
    peer.pid = identity.pid;
    peer.start_time = identity.start_time;
    peer.how = How::kProc;
    peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(identity.pid), 0));
    if (peer.pidfd >= 0) peer.how = How::kPidfd;
    // The descriptor may belong to a later process with the same number: compare after opening it.
    if (process_start_time(identity.pid) != identity.start_time) peer.dead = true;
  }
}

Liveness::~Liveness() {
  for (int r = 0; r < size_; ++r) {
    if (peers_[static_cast<size_t>(r)].pidfd >= 0) ::close(peers_[static_cast<size_t>(r)].pidfd);
  }
}

void Liveness::hold_lock(int file) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = self_;
  lock.l_len = 1;
  if (::fcntl(file, F_SETLK, &lock) == 0) lock_file_ = file;
}

void Liveness::watch_locks() {
  if (lock_file_ < 0) return;
  for (int r = 0; r < size_; ++r) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    if (peer.how == How::kAlways && lock_may_serve_[static_cast<size_t>(r)]) peer.how = How::kLock;
  }
}

bool Liveness::look(const Peer& peer, int rank) const noexcept {
  switch (peer.how) {
    case How::kAlways:
      return true;
    case How::kPidfd: {
      pollfd request{peer.pidfd, POLLIN, 0};
      return ::poll(&request, 1, 0) <= 0;
    }
    case How::kProc:
      return process_start_time(peer.pid) == peer.start_time;
    case How::kLock: {
      struct flock lock {};
      lock.l_type = F_WRLCK;
      lock.l_whence = SEEK_SET;
      lock.l_start = rank;
      lock.l_len = 1;
      return ::fcntl(lock_file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
    }
  }
  return true;
}

bool Liveness::alive(int rank) noexcept {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.dead.load(std::memory_order_relaxed)) return false;
  if (look(peer, rank)) return true;
  peer.dead.store(true, std::memory_order_relaxed);
  return false;
}

}  // namespace trueshard::comm
