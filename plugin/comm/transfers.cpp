// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/transfers.h"

#include <algorithm>
#include <cstring>

#include "plugin/comm/errors.h"
#include "plugin/comm/names.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

const char* name_of(const Transfer& transfer) { return transfer.kind == Transfer::Kind::kSend ? "send" : "recv"; }

std::string amount(uint32_t dtype, int64_t elements) {
  return std::to_string(elements) + " elements of " +
         (dtype == 0 ? "no dtype" : dtype_name(static_cast<c10::ScalarType>(dtype - 1)));
}

std::exception_ptr backend_error(const std::string& text) {
  try {
    throw_backend_error(text);
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr argument_error(const std::string& text) {
  try {
    TORCH_CHECK(false, text);
  } catch (...) {
    return std::current_exception();
  }
}

Letter letter_of(Letter::Kind kind, uint64_t id, const Transfer& transfer) {
  return {
      kind, transfer.tag, id, transfer.bytes, transfer.elements, transfer.dtype, transfer.refusal.empty() ? 0u : 1u};
}

}  // namespace

Transfers::Transfers(const std::shared_ptr<Transport>& transport, Mailbox& mailbox)
    : transport_(*transport), mailbox_(mailbox), peers_(static_cast<size_t>(transport->size())) {}

std::string Transfers::here(const Transfer& transfer) const {
  return where(transport_.rank(), transport_.size(), transport_.group_name()) + " " + name_of(transfer);
}

void Transfers::add(Transfer transfer) {
  ++count_;
  if (transfer.kind == Transfer::Kind::kReceive) return match(std::move(transfer));
  Peer& peer = peers_[static_cast<size_t>(transfer.peer)];
  const uint64_t id = next_id_++;
  peer.outbox.push_back(letter_of(Letter::Kind::kOffer, id, transfer));
  if (transfer.refusal.empty()) {
    peer.offered.emplace(id, std::move(transfer));
  } else {
    finish(transfer, argument_error(here(transfer) + ": " + transfer.refusal));
  }
}

// The earliest offer that fits, or a place among the receives that wait.
void Transfers::match(Transfer receive) {
  for (auto from = offer_order_.begin(); from != offer_order_.end(); ++from) {
    if (receive.peer != kAnyRank && receive.peer != *from) continue;
    std::deque<Letter>& offers = peers_[static_cast<size_t>(*from)].offers;
    const auto found =
        std::find_if(offers.begin(), offers.end(), [&](const Letter& offer) { return offer.tag == receive.tag; });
    if (found == offers.end()) continue;
    const Letter offer = *found;
    const int rank = *from;
    offers.erase(found);
    offer_order_.erase(from);
    return accept(rank, offer, std::move(receive));
  }
  posted_.push_back(std::move(receive));
}

void Transfers::take(int from, const Letter& letter) {
  if (letter.kind != Letter::Kind::kOffer) return begin_sending(from, letter);
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Transfer& receive) {
    return (receive.peer == kAnyRank || receive.peer == from) && receive.tag == letter.tag;
  });
  if (found == posted_.end()) {
    peers_[static_cast<size_t>(from)].offers.push_back(letter);
    offer_order_.push_back(from);
    return;
  }
  Transfer receive = std::move(*found);
  posted_.erase(found);
  accept(from, letter, std::move(receive));
}

void Transfers::accept(int from, const Letter& offer, Transfer receive) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  const std::string other = "rank " + std::to_string(from);
  if (offer.refused != 0) {
    return finish(receive, backend_error(here(receive) + ": " + other +
                                         " could not send what it was asked to; look there for the cause"));
  }
  const bool fits = receive.bytes == offer.bytes && receive.dtype == offer.dtype;
  const bool accepted = receive.refusal.empty() && fits;
  peer.outbox.push_back(letter_of(accepted ? Letter::Kind::kAccept : Letter::Kind::kDecline, offer.id, receive));
  if (!receive.refusal.empty()) return finish(receive, argument_error(here(receive) + ": " + receive.refusal));
  if (!fits) {
    return finish(receive, backend_error(here(receive) + ": " + other + " sends " +
                                         amount(offer.dtype, offer.elements) + ", this rank receives " +
                                         amount(receive.dtype, receive.elements) + "; both must be alike"));
  }
  receive.work->source = from;
  if (receive.bytes == 0) return finish(receive, nullptr);
  observe::chaos_poison(receive.memory->data(), static_cast<size_t>(receive.bytes));
  peer.receiving.push_back({std::move(receive)});
}

void Transfers::begin_sending(int to, const Letter& letter) {
  Peer& peer = peers_[static_cast<size_t>(to)];
  const auto found = peer.offered.find(letter.id);
  if (found == peer.offered.end()) return;  // ended meanwhile
  Transfer send = std::move(found->second);
  peer.offered.erase(found);
  const std::string other = "rank " + std::to_string(to);
  if (letter.kind == Letter::Kind::kAccept) {
    if (send.bytes == 0) return finish(send, nullptr);
    peer.sending.push_back({std::move(send)});
  } else if (letter.refused != 0) {
    finish(send, backend_error(here(send) + ": " + other +
                               " could not receive what it was asked to; look there for the cause"));
  } else {
    finish(send, backend_error(here(send) + ": this rank sends " + amount(send.dtype, send.elements) + ", " + other +
                               " receives " + amount(letter.dtype, letter.elements) + "; both must be alike"));
  }
}

bool Transfers::push(int to) {
  std::deque<Moving>& sending = peers_[static_cast<size_t>(to)].sending;
  bool moved = false;
  while (!sending.empty()) {
    std::byte* piece = mailbox_.piece_to_fill(to);
    if (piece == nullptr) break;
    Moving& front = sending.front();
    const int64_t bytes = std::min(mailbox_.piece_bytes(), front.transfer.bytes - front.offset);
    std::memcpy(piece, front.transfer.memory->data() + front.offset, static_cast<size_t>(bytes));
    observe::chaos_delay(transport_.rank());
    mailbox_.piece_filled(to);
    front.offset += bytes;
    moved = true;
    if (front.offset < front.transfer.bytes) continue;
    Transfer done = std::move(front.transfer);
    sending.pop_front();
    finish(done, nullptr);
  }
  return moved;
}

bool Transfers::pull(int from) {
  std::deque<Moving>& receiving = peers_[static_cast<size_t>(from)].receiving;
  bool moved = false;
  while (!receiving.empty()) {
    const std::byte* piece = mailbox_.piece_to_read(from);
    if (piece == nullptr) break;
    Moving& front = receiving.front();
    const int64_t bytes = std::min(mailbox_.piece_bytes(), front.transfer.bytes - front.offset);
    std::memcpy(front.transfer.memory->data() + front.offset, piece, static_cast<size_t>(bytes));
    mailbox_.piece_was_read(from);
    front.offset += bytes;
    moved = true;
    if (front.offset < front.transfer.bytes) continue;
    Transfer done = std::move(front.transfer);
    receiving.pop_front();
    done.memory->store();
    finish(done, nullptr);
  }
  return moved;
}

bool Transfers::step() {
  bool moved = false;
  for (int r = 0; r < transport_.size(); ++r) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    Letter letter;
    while (mailbox_.read(r, &letter)) {
      take(r, letter);
      moved = true;
    }
    while (!peer.outbox.empty() && mailbox_.write(r, peer.outbox.front())) {
      peer.outbox.pop_front();
      moved = true;
    }
    moved = push(r) || moved;
    moved = pull(r) || moved;
  }
  return moved;
}

bool Transfers::empty() const {
  return count_ == 0 && std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.outbox.empty(); });
}

void Transfers::forget_gone() noexcept {
  for (int r = 0; r < transport_.size(); ++r) {
    Peer& peer = peers_[static_cast<size_t>(r)];
    if (!peer.outbox.empty() && peer.offered.empty() && !transport_.peer_alive(r)) peer.outbox.clear();
  }
}

void Transfers::finish(Transfer& transfer, const std::exception_ptr& error) {
  --count_;
  if (!error && observe::trace_enabled()) {
    const std::string dtype =
        transfer.dtype == 0 ? "none" : dtype_name(static_cast<c10::ScalarType>(transfer.dtype - 1));
    observe::TraceEvent event;
    event.group = transport_.group_name().c_str();
    event.channel = "point to point";
    event.operation = name_of(transfer);
    event.dtype = dtype.c_str();
    event.rank = transport_.rank();
    event.elements = transfer.elements;
    event.start_ns = transfer.start_ns;
    event.end_ns = observe::now_ns();
    observe::trace(event);
  }
  transfer.memory.reset();
  transfer.work->complete(error);
}

// `visitor(transfer, peer)` for all that are under way; kAnyRank where the peer is not known yet.
template <class Visitor>
void Transfers::visit(const Visitor& visitor) const {
  for (const Transfer& receive : posted_) visitor(receive, receive.peer);
  for (int r = 0; r < transport_.size(); ++r) {
    const Peer& peer = peers_[static_cast<size_t>(r)];
    for (const auto& entry : peer.offered) visitor(entry.second, r);
    for (const Moving& moving : peer.sending) visitor(moving.transfer, r);
    for (const Moving& moving : peer.receiving) visitor(moving.transfer, r);
  }
}

int64_t Transfers::next_deadline_ns() const {
  int64_t earliest = 0;
  visit([&](const Transfer& transfer, int) {
    if (earliest == 0 || transfer.deadline_ns < earliest) earliest = transfer.deadline_ns;
  });
  return earliest;
}

std::string Transfers::complaint(const Transfer& transfer, int peer, int64_t now_ns) const {
  const bool receive = transfer.kind == Transfer::Kind::kReceive;
  const std::string missing = std::string(receive ? " sent" : " received") + " the message with tag " +
                              std::to_string(transfer.tag) + " (" + amount(transfer.dtype, transfer.elements) + ")";
  std::vector<int> gone;
  for (int r = 0; r < transport_.size(); ++r) {
    if ((peer == kAnyRank ? r != transport_.rank() : r == peer) && !transport_.peer_alive(r)) gone.push_back(r);
  }
  const size_t candidates = peer == kAnyRank ? static_cast<size_t>(transport_.size()) - 1 : 1;
  if (!gone.empty() && gone.size() == candidates) {
    const bool many = gone.size() > 1;
    return here(transfer) + ": " + rank_list(gone) + (many ? " are" : " is") + " gone (" +
           transport_.how_peer_left(gone.front()) + ") and " + (many ? "have" : "has") + " not" + missing +
           "; look there for the cause";
  }
  if (now_ns < transfer.deadline_ns) return {};
  return here(transfer) + ": " + (peer == kAnyRank ? "no rank" : "rank " + std::to_string(peer)) + " has" +
         (peer == kAnyRank ? "" : " not") + missing + " after " +
         std::to_string((now_ns - transfer.start_ns) / 1000000) +
         " ms; look there for an error or for another order of calls, or give a longer timeout to the group";
}

std::string Transfers::problem() const {
  std::string text;
  const int64_t now = observe::now_ns();
  visit([&](const Transfer& transfer, int peer) {
    if (text.empty()) text = complaint(transfer, peer, now);
  });
  return text;
}

void Transfers::end_all(const std::exception_ptr& error) {
  std::list<Transfer> ended = std::move(posted_);
  posted_.clear();
  for (Peer& peer : peers_) {
    for (auto& entry : peer.offered) ended.push_back(std::move(entry.second));
    for (std::deque<Moving>* list : {&peer.sending, &peer.receiving}) {
      for (Moving& moving : *list) ended.push_back(std::move(moving.transfer));
    }
    peer = Peer{};
  }
  for (Transfer& transfer : ended) finish(transfer, error);
}

}  // namespace trueshard::comm
