// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/mailbox.h"

#include <atomic>
#include <cstring>
#include <vector>

namespace trueshard::comm {
namespace {

constexpr uint64_t kLetters = 32, kPieces = 4;
constexpr int64_t kPieceBytes = 256 * 1024, kPieceBytesOfLargeGroups = 64 * 1024;
constexpr int kLargeGroup = 32;
constexpr size_t kHeadBytes = 4096;  // the bell; then the counters, the letters, the pieces
static_assert(sizeof(Letter) == 40);

}  // namespace

struct alignas(128) Mailbox::Counters {
  std::atomic<uint64_t> letters_written, pieces_written;
  alignas(64) std::atomic<uint64_t> letters_read, pieces_read;  // of what the other wrote
};

Mailbox::Mailbox(const std::shared_ptr<Transport>& transport)
    : transport_(transport), piece_bytes_(transport->size() < kLargeGroup ? kPieceBytes : kPieceBytesOfLargeGroups) {
  const size_t of_pair = sizeof(Counters) + kLetters * sizeof(Letter) + kPieces * static_cast<size_t>(piece_bytes_);
  region_ = transport->allocate("mailbox", kHeadBytes + of_pair * static_cast<size_t>(transport->size()));
  std::vector<Flag*> bells;
  for (int r = 0; r < transport->size(); ++r) bells.push_back(&bell(r));
  transport_->wake_list().add(this, bells);
}

Mailbox::~Mailbox() { transport_->wake_list().remove(this); }

Flag& Mailbox::bell(int rank) const { return *reinterpret_cast<Flag*>(region_->data(rank)); }

uint64_t Mailbox::rung() const { return bell(transport_->rank()).word.load(std::memory_order_acquire) >> 1; }

Mailbox::Counters& Mailbox::counters(int owner, int other) const {
  return reinterpret_cast<Counters*>(region_->data(owner) + kHeadBytes)[other];
}

std::byte* Mailbox::letters(int from, int to) const {
  const size_t before = kHeadBytes + sizeof(Counters) * static_cast<size_t>(transport_->size());
  return region_->data(from) + before + kLetters * sizeof(Letter) * static_cast<size_t>(to);
}

std::byte* Mailbox::pieces(int from, int to) const {
  const auto size = static_cast<size_t>(transport_->size());
  const size_t before = kHeadBytes + (sizeof(Counters) + kLetters * sizeof(Letter)) * size;
  return region_->data(from) + before + kPieces * static_cast<size_t>(piece_bytes_) * static_cast<size_t>(to);
}

bool Mailbox::write(int to, const Letter& letter) {
  const int self = transport_->rank();
  std::atomic<uint64_t>& written = counters(self, to).letters_written;
  const uint64_t number = written.load(std::memory_order_relaxed);
  if (number - counters(to, self).letters_read.load(std::memory_order_acquire) >= kLetters) return false;
  std::memcpy(letters(self, to) + number % kLetters * sizeof(Letter), &letter, sizeof letter);
  written.store(number + 1, std::memory_order_release);
  ring(to);
  return true;
}

bool Mailbox::read(int from, Letter* letter) {
  const int self = transport_->rank();
  std::atomic<uint64_t>& read = counters(self, from).letters_read;
  const uint64_t number = read.load(std::memory_order_relaxed);
  if (counters(from, self).letters_written.load(std::memory_order_acquire) == number) return false;
  std::memcpy(letter, letters(from, self) + number % kLetters * sizeof(Letter), sizeof *letter);
  read.store(number + 1, std::memory_order_release);
  ring(from);  // it may have found the ring full
  return true;
}

std::byte* Mailbox::piece_to_fill(int to) {
  const int self = transport_->rank();
  const uint64_t number = counters(self, to).pieces_written.load(std::memory_order_relaxed);
  if (number - counters(to, self).pieces_read.load(std::memory_order_acquire) >= kPieces) return nullptr;
  return pieces(self, to) + static_cast<int64_t>(number % kPieces) * piece_bytes_;
}

void Mailbox::piece_filled(int to) {
  counters(transport_->rank(), to).pieces_written.fetch_add(1, std::memory_order_release);
  ring(to);
}

const std::byte* Mailbox::piece_to_read(int from) {
  const int self = transport_->rank();
  const uint64_t number = counters(self, from).pieces_read.load(std::memory_order_relaxed);
  if (counters(from, self).pieces_written.load(std::memory_order_acquire) == number) return nullptr;
  return pieces(from, self) + static_cast<int64_t>(number % kPieces) * piece_bytes_;
}

void Mailbox::piece_was_read(int from) {
  counters(transport_->rank(), from).pieces_read.fetch_add(1, std::memory_order_release);
  ring(from);
}

}  // namespace trueshard::comm
