// SPDX-License-Identifier: BSD-3-Clause
// One bucket: leaves into this rank's area, the message about them, the sum out of everybody's areas.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <sstream>

#include "plugin/comm/errors.h"
#include "plugin/engine/dtypes.h"
#include "plugin/engine/reducer.h"
#include "plugin/observe/trace.h"

namespace trueshard::engine {

namespace {

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), start_(observe::now_ns()) {}
  ~Stopwatch() { seconds_ += static_cast<double>(observe::now_ns() - start_) * 1e-9; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  int64_t start_;
};

}  // namespace

// Each area has a narrow part, for leaves in the compute dtype, and a wide part, for leaves in the master dtype
// (deferred passes, sparse gradients). Pages that are never touched take no memory.
void Reducer::lay_out_areas() {
  narrow_offset_.assign(static_cast<size_t>(model_->size()), 0);
  wide_offset_.assign(static_cast<size_t>(model_->size()), 0);
  for (const auto& bucket : model_->plan().buckets) {
    size_t bytes = 0;
    for (const auto& placement : bucket.placements) {
      narrow_offset_[placement.parameter] = bytes;
      bytes += aligned(static_cast<size_t>(placement.numel * model_->compute_itemsize(placement.parameter)));
    }
    bytes = (bytes + 4095) / 4096 * 4096;
    for (const auto& placement : bucket.placements) {
      wide_offset_[placement.parameter] = bytes;
      bytes += aligned(static_cast<size_t>(placement.numel * model_->master_itemsize(placement.parameter)));
    }
    area_bytes_ = std::max(area_bytes_, (bytes + 4095) / 4096 * 4096);
  }
  const int64_t buckets = static_cast<int64_t>(model_->plan().buckets.size());
  // ZeRO-2 holds few buckets in flight; the others may have a whole pass on its way, and never wait for room.
  area_count_ =
      std::max<int64_t>(1, model_->options().stage() >= Stage::Zero2 ? std::min<int64_t>(buckets, 3) : buckets);
  area_user_.assign(static_cast<size_t>(area_count_), 0);
  area_touched_.assign(static_cast<size_t>(area_count_), 0);
  areas_ = model_->transport()->allocate(model_->name() + "/exchange", area_bytes_ * static_cast<size_t>(area_count_));
}

std::byte* Reducer::leaf_data(int64_t bucket, int64_t placement, bool wide, int rank) const {
  const int64_t area = (pass_->first_area + bucket) % area_count_;
  const int64_t parameter = model_->plan().buckets[bucket].placements[placement].parameter;
  return areas_->data(rank) + static_cast<size_t>(area) * area_bytes_ +
         (wide ? wide_offset_ : narrow_offset_)[parameter];
}

bool Reducer::area_is_free(int64_t bucket, bool wait) {
  auto& pass = *pass_;
  if (bucket >=
      pass.next_sum + area_count_) {  // an earlier bucket of this pass lies there, and this rank has not summed it
    if (!wait || bucket >= pass.next_post + area_count_) return false;
    while (bucket >= pass.next_sum + area_count_) sum_bucket(pass.next_sum);
  }
  const uint64_t user = area_user_[(pass.first_area + bucket) % area_count_];
  if (user == 0 || channel_->all_read(user)) return true;
  if (!wait) return false;
  // Peers read only what they have everybody's message for: this rank must not owe them a sum while it waits.
  while (pass.next_sum < pass.next_post) sum_bucket(pass.next_sum);
  channel_->wait_all_read(user);
  return true;
}

void Reducer::advance(bool may_wait) {
  auto& pass = *pass_;
  const int64_t buckets = static_cast<int64_t>(sums_.size());
  while (pass.next_post < buckets && pass.missing[pass.next_post] == 0) {
    if (!area_is_free(pass.next_post, may_wait)) break;
    post_bucket(pass.next_post);
  }
  while (pass.next_sum < pass.next_post && channel_->all_posted(pass.posted[pass.next_sum])) sum_bucket(pass.next_sum);
}

// The parameter's gradient as a dense tensor in the parameter's own memory order, taken out of .grad; undefined when
// there is none.
at::Tensor Reducer::take_leaf(int64_t p) {
  auto& parameter = model_->parameters()[p];
  auto& tensor = parameter.tensor;
  if (placeholder_set_[p] || !tensor.grad().defined()) return {};
  at::Tensor gradient = tensor.grad().detach();
  tensor.mutable_grad() = at::Tensor();
  if (gradient.sizes() != parameter.sizes) {
    std::ostringstream text;
    text << "the gradient of '" << parameter.name << "' is " << gradient.sizes() << ", the parameter was "
         << at::IntArrayRef(parameter.sizes) << " when it was sharded; give it that shape again, or call shard() anew";
    note_error(text.str());
    return {};
  }
  if (gradient.is_sparse()) gradient = gradient.to(parameter.master_dtype).coalesce().to_dense();
  if (gradient.strides() != parameter.strides || !gradient.is_non_overlapping_and_dense()) {
    auto dense = at::empty_strided(parameter.sizes, parameter.strides, gradient.options());
    dense.copy_(gradient);
    gradient = std::move(dense);
  }
  return gradient;
}

void Reducer::copy_leaf(int64_t bucket, int64_t placement) {
  auto& pass = *pass_;
  const int64_t p = model_->plan().buckets[bucket].placements[placement].parameter;
  auto& parameter = model_->parameters()[p];
  Stopwatch watch(counters_.seconds_communicating);
  const bool again = pass.leaf[p] & kCopied;
  pass.leaf[p] |= kCopied;
  if (pass.abandoned) {
    if (!placeholder_set_[p]) parameter.tensor.mutable_grad() = at::Tensor();
    return;
  }
  at::Tensor leaf = is_frozen(p) ? at::Tensor() : take_leaf(p);
  if (again) {  // one more contribution than expected, while the bucket is still here: adds up as libtorch adds
    if (!leaf.defined()) return;
    const bool wide = pass.leaf[p] & kWide;
    auto there = model_->tensor_over(leaf_data(bucket, placement, wide, model_->rank()), parameter.sizes,
                                     parameter.strides, wide ? parameter.master_dtype : parameter.compute_dtype);
    there.add_(leaf);
    place_placeholder(p);
    return;
  }
  if (deferred_[p].defined() && !is_frozen(p)) {
    leaf = leaf.defined() ? deferred_[p].add_(leaf.to(parameter.master_dtype)) : deferred_[p];
    deferred_[p] = at::Tensor();
  }
  if (!leaf.defined()) {
    observe::chaos_poison(leaf_data(bucket, placement, false, model_->rank()),
                          static_cast<size_t>(parameter.numel * model_->compute_itemsize(p)));
    return;
  }
  if (leaf.scalar_type() != parameter.compute_dtype && leaf.scalar_type() != parameter.master_dtype)
    leaf = leaf.to(parameter.master_dtype);
  const bool wide = leaf.scalar_type() != parameter.compute_dtype;
  observe::chaos_poison(leaf_data(bucket, placement, !wide, model_->rank()),
                        leaf.nbytes() / 2);  // what nobody may read
  if (leaf.nbytes() > 0)
    std::memcpy(leaf_data(bucket, placement, wide, model_->rank()), leaf.const_data_ptr(), leaf.nbytes());
  counters_.bytes_reduced += static_cast<int64_t>(leaf.nbytes());
  pass.leaf[p] |= static_cast<uint8_t>(kPresent | (wide ? kWide : 0));
  place_placeholder(p);
}

void Reducer::post_bucket(int64_t bucket) {
  auto& pass = *pass_;
  const auto& placements = model_->plan().buckets[bucket].placements;
  std::vector<std::byte> record(sizeof(MessageHeader) + placements.size());
  int64_t bytes = 0;
  for (size_t i = 0; i < placements.size(); ++i) {
    const int64_t p = placements[i].parameter;
    if (!(pass.leaf[p] & kCopied)) copy_leaf(bucket, static_cast<int64_t>(i));
    uint8_t flags = pass.leaf[p] & (kPresent | kWide);
    if (flags & kPresent) {
      bytes += placements[i].numel * ((flags & kWide) ? model_->master_itemsize(p) : model_->compute_itemsize(p));
    }
    if (is_frozen(p)) flags |= kFrozen;
    if (zeroed_[p]) flags |= kZeroed;
    record[sizeof(MessageHeader) + i] = static_cast<std::byte>(flags);
  }
  MessageHeader header;
  header.scale = pass.abandoned ? kAnyScale : pass.scale;
  header.deferred = deferred_passes_;
  tell_errors(header);
  header.zeroed = 0;  // told by the record, which names the parameter
  error_told_ |= header.tainted != 0;
  std::memcpy(record.data(), &header, sizeof header);
  auto fingerprint = comm::Fingerprint::of("reduce bucket");
  fingerprint.pass = static_cast<uint32_t>(passes_);
  fingerprint.bucket = bucket;
  fingerprint.elements = model_->plan().buckets[bucket].padded;
  Stopwatch watch(counters_.seconds_communicating);
  pass.posted[bucket] = channel_->post(fingerprint, record.data(), record.size());
  area_user_[(pass.first_area + bucket) % area_count_] = pass.posted[bucket];
  auto& touched = area_touched_[(pass.first_area + bucket) % area_count_];
  touched = std::max(touched, bytes);
  ++pass.next_post;
}

void Reducer::compare_records(int64_t bucket, uint64_t seq) {
  check_headers(seq, "backward");
  const auto& placements = model_->plan().buckets[bucket].placements;
  const auto* zero = channel_->record(0, seq) + sizeof(MessageHeader);
  for (size_t i = 0; i < placements.size() && taint_.empty(); ++i) {
    for (int r = 1; r < model_->world(); ++r) {
      const auto* other = channel_->record(r, seq) + sizeof(MessageHeader);
      const auto difference = static_cast<uint8_t>(zero[i] ^ other[i]);
      const auto& name = model_->parameters()[placements[i].parameter].name;
      if (difference & kFrozen) {
        const bool on_zero = static_cast<uint8_t>(zero[i]) & kFrozen;
        taint_ = me() + " backward: parameter '" + name + "' is " + (on_zero ? "frozen" : "trainable") +
                 " on rank 0 and " + (on_zero ? "trainable" : "frozen") + " on rank " + std::to_string(r) +
                 "; call requires_grad_() alike on all ranks, then zero_grad()";
        return;
      }
      if (difference & kZeroed) {
        taint_ = me() + " backward: the gradient of '" + name + "' was zeroed on some ranks only (rank 0 and rank " +
                 std::to_string(r) + " differ); zero the same gradients on all ranks";
        return;
      }
    }
  }
}

void Reducer::sum_bucket(int64_t bucket) {
  auto& pass = *pass_;
  const uint64_t seq = pass.posted[bucket];
  Stopwatch watch(counters_.seconds_communicating);
  try {
    channel_->wait_all_posted(seq);
  } catch (const c10::DistBackendError& error) {
    break_off(error);
  }
  compare_records(bucket, seq);
  settle_scale(seq);
  if (taint_.empty()) {
    const auto& placements = model_->plan().buckets[bucket].placements;
    std::vector<std::vector<PartialSums::Leaf>> leaves(model_->world(),
                                                       std::vector<PartialSums::Leaf>(placements.size()));
    for (int r = 0; r < model_->world(); ++r) {
      const auto* flags = channel_->record(r, seq) + sizeof(MessageHeader);
      for (size_t i = 0; i < placements.size(); ++i) {
        const auto flag = static_cast<uint8_t>(flags[i]);
        if (!(flag & kPresent)) continue;
        const auto& parameter = model_->parameters()[placements[i].parameter];
        const bool wide = flag & kWide;
        leaves[r][i] = {leaf_data(bucket, static_cast<int64_t>(i), wide, r),
                        wide ? parameter.master_dtype : parameter.compute_dtype};
      }
    }
    sums_[bucket].push(leaves);
  }
  channel_->done_reading(seq);
  ++pass.next_sum;
}

// Replicated: every rank has finished its piece of each gradient; all fetch the others' pieces.
void Reducer::gather_gradients() {
  Stopwatch watch(counters_.seconds_communicating);
  const uint64_t seq = meet(comm::Fingerprint::of("gather gradients"));
  for (int64_t p = 0; p < model_->size(); ++p) {
    if (!sums_[model_->plan().bucket_of[p]].base(model_->plan().placement_of[p])) continue;
    for (int k = 1; k < model_->world(); ++k) {
      const int r = (model_->rank() + k) % model_->world();
      const auto piece = model_->piece(p, r);
      if (piece.empty()) continue;
      const int64_t item = model_->master_itemsize(p);
      std::memcpy(model_->gradient(p) + piece.begin * item, model_->peer_gradient(p, r) + piece.begin * item,
                  static_cast<size_t>(piece.size() * item));
      counters_.bytes_gathered += piece.size() * item;
    }
  }
  done_and_wait(seq);  // from now on the user may write to the gradients
}

}  // namespace trueshard::engine
