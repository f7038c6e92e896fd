// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/channel.h"

#include <cinttypes>
#include <cstdio>
#include <memory>
#include <vector>

#include "plugin/comm/errors.h"
#include "plugin/comm/names.h"
#include "plugin/comm/patience.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

constexpr size_t kLine = 128;
size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::string dtype_text(uint32_t dtype) {
  return dtype == 0 ? "none" : dtype_name(static_cast<c10::ScalarType>(dtype - 1));
}
std::string reduction_text(uint32_t reduction) {
  return reduction == 0 ? "none" : reduction_name(static_cast<int>(reduction) - 1);
}
std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIx64, value);
  return text;
}

// "'allreduce' (message 17, float32, 1000 elements)"
std::string describe(const Fingerprint& f, uint64_t seq) {
  std::string text = std::string("'") + f.operation + "' (message " + std::to_string(seq);
  if (f.dtype != 0) text += ", " + dtype_text(f.dtype);
  if (f.bucket >= 0) text += ", bucket " + std::to_string(f.bucket);
  return text + ", " + std::to_string(f.elements) + " elements)";
}

std::string differences(const Fingerprint& mine, const Fingerprint& theirs, int peer) {
  std::string text;
  const auto add = [&](const char* field, const std::string& here, const std::string& there) {
    if (here != there)
      text += std::string("; ") + field + " is " + here + " here and " + there + " on rank " + std::to_string(peer);
  };
  add("operation", std::string("'") + mine.operation + "'", std::string("'") + theirs.operation + "'");
  add("dtype", dtype_text(mine.dtype), dtype_text(theirs.dtype));
  add("reduction", reduction_text(mine.reduction), reduction_text(theirs.reduction));
  add("root", std::to_string(mine.root), std::to_string(theirs.root));
  add("pass", std::to_string(mine.pass), std::to_string(theirs.pass));
  add("elements", std::to_string(mine.elements), std::to_string(theirs.elements));
  add("bucket", std::to_string(mine.bucket), std::to_string(theirs.bucket));
  add("detail", hex(mine.detail), hex(theirs.detail));
  return text;
}

bool same(const Fingerprint& a, const Fingerprint& b) {
  return std::strncmp(a.operation, b.operation, sizeof a.operation) == 0 && a.dtype == b.dtype &&
         a.reduction == b.reduction && a.root == b.root && a.pass == b.pass && a.elements == b.elements &&
         a.bucket == b.bucket && a.detail == b.detail;
}

struct Head {  // at the start of each rank's block
  Flag posted;
  Flag read;
};

}  // namespace

struct Channel::State {
  State(Transport& the_transport, const std::string& the_name, const ChannelOptions& the_options)
      : transport(the_transport), name(the_name), options(the_options) {}

  Transport& transport;
  std::string name;
  ChannelOptions options;
  std::shared_ptr<Region> region;
  std::vector<Flag*> posted_flags, read_flags;  // by rank
  std::vector<std::byte*> slots;                // by rank: its first slot
  size_t stride = 0;
  uint64_t next = 1;
  uint64_t read_by_all = 0;  // a lower bound of what all peers have read
  uint64_t done = 0;         // what this rank has read
  int64_t waited_ns = 0;
  std::chrono::milliseconds limit{0};
  std::vector<int64_t> start_ns;  // by slot; only while tracing

  size_t slot_of(uint64_t seq) const { return static_cast<size_t>(seq % static_cast<uint64_t>(options.depth)); }
  std::byte* slot(int rank, uint64_t seq) const { return slots[static_cast<size_t>(rank)] + slot_of(seq) * stride; }
  Fingerprint& fingerprint(int rank, uint64_t seq) const { return *reinterpret_cast<Fingerprint*>(slot(rank, seq)); }
  std::string here() const {
    return where(transport.rank(), transport.size(), transport.group_name()) + " channel '" + name + "'";
  }
  std::chrono::milliseconds patience() const { return limit.count() > 0 ? limit : transport.timeout(); }
  PeerFlags posted_by(uint64_t seq) const { return {transport, posted_flags.data(), seq, patience()}; }
  PeerFlags read_by(uint64_t seq) const { return {transport, read_flags.data(), seq, patience()}; }

  void settle(const WaitResult& result, uint64_t seq, const char* what_missing);
  void compare(int peer, uint64_t seq);
  void trace_until(uint64_t seq);
};

// `what_missing`: "posted" or "finished reading".
void Channel::State::settle(const WaitResult& result, uint64_t seq, const char* what_missing) {
  waited_ns += result.waited_ns;
  if (result.outcome == Outcome::kReached) return;
  if (result.outcome != Outcome::kFailed) {
    // The text describes this rank's own message: it is what the late ranks should have posted.
    const bool known = seq < next && seq + static_cast<uint64_t>(options.depth) >= next;
    const std::string message =
        known ? describe(fingerprint(transport.rank(), seq), seq) : "message " + std::to_string(seq);
    const bool many = result.late.size() > 1;
    std::string text = here() + ": " + rank_list(result.late);
    if (result.outcome == Outcome::kGone) {
      text += std::string(many ? " are" : " is") + " gone (" + transport.how_peer_left(result.late.front()) + ") and " +
              (many ? "have" : "has") + " not " + what_missing + " " + message + "; look there for the cause";
    } else {
      text += std::string(many ? " have" : " has") + " not " + what_missing + " " + message + " after " +
              std::to_string(result.waited_ns / 1000000) +
              " ms; look there for an error or for another order of calls, or give a "
              "longer timeout to the group";
    }
    transport.fail(text);
    throw_backend_error(text);
  }
  transport.throw_if_failed();
}

void Channel::State::compare(int peer, uint64_t seq) {
  if (seq + static_cast<uint64_t>(options.depth) < next) return;  // long since read and compared
  const Fingerprint& mine = fingerprint(transport.rank(), seq);
  const Fingerprint& theirs = fingerprint(peer, seq);
  if (same(mine, theirs)) return;
  const std::string text = here() + ", message " + std::to_string(seq) + ": this rank runs '" + mine.operation +
                           "' but rank " + std::to_string(peer) + " runs '" + theirs.operation + "'" +
                           differences(mine, theirs, peer) +
                           "; all ranks must make the same calls with the same arguments in the same order";
  if (seq > done) {
    done = seq;
    comm::post(*read_flags[static_cast<size_t>(transport.rank())], seq);
  }
  throw_backend_error(text);
}

void Channel::State::trace_until(uint64_t seq) {
  if (start_ns.empty()) return;
  for (uint64_t s = done + 1; s <= seq; ++s) {
    if (s >= next || s + static_cast<uint64_t>(options.depth) < next) continue;
    const Fingerprint& f = fingerprint(transport.rank(), s);
    const std::string dtype = dtype_text(f.dtype);
    observe::TraceEvent event;
    event.group = transport.group_name().c_str();
    event.channel = name.c_str();
    event.operation = f.operation;
    event.dtype = dtype.c_str();
    event.rank = transport.rank();
    event.sequence = s;
    event.elements = f.elements;
    event.start_ns = start_ns[slot_of(s)];
    event.end_ns = observe::now_ns();
    observe::trace(event);
  }
}

Channel::Channel(std::shared_ptr<Transport> transport, const std::string& name, ChannelOptions options)
    : transport_(std::move(transport)), state_(std::make_unique<State>(*transport_, name, options)) {
  State& s = *state_;
  TORCH_CHECK(options.depth >= 1, s.here(), ": depth is ", options.depth, ", expected at least 1");
  s.stride = lines(sizeof(Fingerprint) + options.record_bytes);
  const size_t bytes = sizeof(Head) + s.stride * static_cast<size_t>(options.depth);
  s.region = transport_->allocate("channel " + name, bytes);
  for (int r = 0; r < size(); ++r) {
    if (s.region->bytes(r) != bytes) {
      throw_backend_error(s.here() + ": this rank's messages take " + std::to_string(bytes) + " bytes but rank " +
                          std::to_string(r) + "'s take " + std::to_string(s.region->bytes(r)) +
                          "; record size and depth must agree");
    }
    auto* head = reinterpret_cast<Head*>(s.region->data(r));
    s.posted_flags.push_back(&head->posted);
    s.read_flags.push_back(&head->read);
    s.slots.push_back(s.region->data(r) + sizeof(Head));
  }
  if (options.trace && observe::trace_enabled()) s.start_ns.assign(static_cast<size_t>(options.depth), 0);
  transport_->wake_list().add(this, s.posted_flags);
  transport_->wake_list().add(this, s.read_flags);
}

Channel::~Channel() { transport_->wake_list().remove(this); }

uint64_t Channel::next() const { return state_->next; }

uint64_t Channel::post(const Fingerprint& fingerprint, const void* record, size_t record_bytes) {
  State& s = *state_;
  transport_->check_process("message");
  transport_->throw_if_failed();
  TORCH_CHECK(record_bytes <= s.options.record_bytes, s.here(), ": a record of ", record_bytes, " bytes, at most ",
              s.options.record_bytes, " were announced");
  const uint64_t seq = s.next;
  const auto depth = static_cast<uint64_t>(s.options.depth);
  if (seq > depth && s.read_by_all < seq - depth) wait_all_read(seq - depth);
  observe::chaos_delay(rank());
  std::byte* slot = s.slot(rank(), seq);
  std::memcpy(slot, &fingerprint, sizeof fingerprint);
  if (record_bytes > 0) std::memcpy(slot + sizeof fingerprint, record, record_bytes);
  if (!s.start_ns.empty()) s.start_ns[s.slot_of(seq)] = observe::now_ns();
  s.next = seq + 1;
  comm::post(*s.posted_flags[static_cast<size_t>(rank())], seq);
  return seq;
}

bool Channel::can_post() const {
  const auto depth = static_cast<uint64_t>(state_->options.depth);
  return state_->next <= depth || all_read(state_->next - depth);
}

bool Channel::posted(int peer, uint64_t seq) const {
  return reached(*state_->posted_flags[static_cast<size_t>(peer)], seq);
}
bool Channel::all_posted(uint64_t seq) const { return all_reached(state_->posted_by(seq)); }

void Channel::wait_posted(int peer, uint64_t seq) {
  State& s = *state_;
  TORCH_CHECK(seq < s.next, s.here(), ": message ", seq, " is waited for before this rank posted its own");
  s.settle(wait_for_one(s.posted_by(seq), peer), seq, "posted");
  observe::chaos_delay(rank());
  if (peer != rank()) s.compare(peer, seq);
}

void Channel::wait_all_posted(uint64_t seq) {
  State& s = *state_;
  TORCH_CHECK(seq < s.next, s.here(), ": message ", seq, " is waited for before this rank posted its own");
  s.settle(wait_for_all(s.posted_by(seq)), seq, "posted");
  observe::chaos_delay(rank());
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) s.compare(r, seq);
  }
}

const std::byte* Channel::record(int peer, uint64_t seq) const { return state_->slot(peer, seq) + sizeof(Fingerprint); }

void Channel::done_reading(uint64_t seq) {
  State& s = *state_;
  if (seq <= s.done) return;
  observe::chaos_delay(rank());
  s.trace_until(seq);
  s.done = seq;
  comm::post(*s.read_flags[static_cast<size_t>(rank())], seq);
}

bool Channel::all_read(uint64_t seq) const {
  if (state_->read_by_all >= seq) return true;
  if (!all_reached(state_->read_by(seq))) return false;
  state_->read_by_all = seq;
  return true;
}

void Channel::wait_all_read(uint64_t seq) {
  State& s = *state_;
  if (all_read(seq)) return;
  s.settle(wait_for_all(s.read_by(seq)), seq, "finished reading");
  s.read_by_all = seq;
}

void Channel::set_wait_limit(std::chrono::milliseconds limit) { state_->limit = limit; }
double Channel::seconds_waited() const { return static_cast<double>(state_->waited_ns) * 1e-9; }
uint64_t Channel::messages() const { return state_->next - 1; }

}  // namespace trueshard::comm
