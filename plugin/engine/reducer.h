// SPDX-License-Identifier: BSD-3-Clause
// Role: the gradients' way from autograd to the reduced shard: hooks, buckets in agreed order, exchange, canonical sum.
// A pass: each parameter's leaf is copied into this rank's exchange area as soon as it is complete; a complete bucket
// is posted; buckets that all ranks have posted are summed, piece by piece, in place from the peers' areas. finish()
// ends the tree. Invariants: I1 the sequence of messages depends on the agreed plan and the calls only, never on which
// gradients exist. I2 buckets are
//             posted and summed in plan order. I3 nothing waits inside a hook when several optimizers share the group.
//             I4 after an error no weight has changed, and zero_grad() makes the optimizer usable again (a lost peer or
//             diverged calls: not).
// Threads: one at a time. Errors: c10::Error, the same on all ranks.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "plugin/comm/channel.h"
#include "plugin/engine/backward_tracker.h"
#include "plugin/engine/gradient_hooks.h"
#include "plugin/engine/partial_sums.h"
#include "plugin/engine/sharded_model.h"

namespace trueshard::engine {

// What every message of an optimizer says beside its fingerprint; compared by every rank in the same way.
struct MessageHeader {
  double scale = 0;       // of the loss; 0: not scaled
  uint32_t deferred = 0;  // passes under NoSyncGuard since the last synchronised one
  uint32_t tainted = 0;   // this rank has noted an error
  uint32_t flag = 0;      // agree_any()
  uint64_t zeroed = 0;    // finish: gradients zeroed one by one since the last pass
  uint64_t digest = 0;    // finish: what changed behind the optimizer's back, and full-parameter guards
  char error[360] = {};
};

struct ReducerCounters {
  int64_t bytes_reduced = 0, bytes_gathered = 0;
  double seconds_communicating = 0;
};

class Reducer : public GradientSink, public BackwardMember {
 public:
  // `shards[p]`: the optimizer's tensor for parameter p, undefined when the optimizer does not have it. Collective.
  Reducer(std::shared_ptr<ShardedModel> model, std::vector<at::Tensor> shards);
  ~Reducer() override;

  void empty_pass();
  // Collective unless already finished. `digest`: must agree on all ranks (changes to parameters outside the
  // optimizer).
  void finish(uint64_t digest);
  void zero();           // gradients become undefined
  void zero_in_place();  // gradients that exist become +0.0
  void defer(int change) { no_sync_ += change; }
  // Notices gradients zeroed through the module or the base class, and newly trainable parameters.
  void notice_changes();
  // Notes an error when gradients were put where they would be lost.
  void refuse_foreign_gradients();
  // The gradients that are there are +0.0, from zero_grad(false): any scale may follow.
  bool base_is_zero() const { return base_is_zero_; }

  bool finished() const { return finished_; }
  bool pass_open() const { return pass_.has_value(); }
  int64_t passes() const { return passes_; }
  double scale() const { return scale_; }  // of the passes that were finished; 0: not scaled
  bool has_gradient(int64_t parameter) const {
    return has_gradient_[parameter];
  }  // after finish, the same on all ranks
  GradientRecord& record() { return record_; }
  // Recorded squares and the finite flag still describe the gradients: nobody wrote to them since.
  bool record_is_current() const;
  const at::Tensor& gradient_tensor(int64_t parameter) const { return gradients_[parameter]; }
  const at::Tensor& shard(int64_t parameter) const { return shards_[parameter]; }
  // Puts the gradient tensors (show) or tensors that throw `text` (hide) into the shards' grad().
  void show_gradients();
  void hide_gradients(const std::vector<at::Tensor>& stand_ins);
  void reshow_gradients();          // after hide_gradients(); what the record says stays true
  bool gradients_are_ours() const;  // nobody replaced or wrote to a gradient since they were shown
  bool any_gradient() const;
  void throw_if_tainted() const { TORCH_CHECK(taint_.empty(), taint_); }
  const ReducerCounters& counters() const { return counters_; }
  int64_t deferred_bytes() const;
  int64_t partial_bytes() const;
  int64_t exchange_bytes() const;  // touched so far
  comm::Channel& channel() { return *channel_; }

  // Posts a message of the optimizer's sequence and waits for everybody's; the caller ends with done(seq).
  uint64_t meet(const comm::Fingerprint& fingerprint, const MessageHeader& header = {});
  // True on all ranks when it is true on any. Collective.
  bool agree_any(const char* operation, bool flag);
  void done(uint64_t seq) { channel_->done_reading(seq); }
  void done_and_wait(uint64_t seq);  // until everybody is done: what was read may be written again
  // Notes what any rank's message says is wrong, or says otherwise than the others', alike on all ranks (see
  // throw_if_tainted).
  void check_headers(uint64_t seq, const char* where);
  // The same for the digests alone: what differs, or nothing.
  std::string differing_digests(uint64_t seq) const;
  // Puts what this rank has noted into a message that check_headers() reads.
  void tell_errors(MessageHeader& header) const;
  // Tells `text` to all ranks with the next message, which then throws everywhere.
  void note_error(const std::string& text);
  double tree_scale() const { return tree_scale_; }  // of the passes not yet finished; 0: not scaled, -1: none
  bool has_base() const;                             // some gradient from before is kept, new passes add to it
  std::string me() const;                            // "trueshard[rank 1/4]"

 private:
  struct Pass {
    bool deferred = false;
    bool overlapped = false;
    bool abandoned = false;
    double scale = 0;                     // kAnyScale: this rank has no leaf in the pass
    std::vector<int> contributions;       // per parameter
    std::vector<uint8_t> leaf;            // per parameter: flags of ParameterFlag for what lies in the area
    std::vector<int> missing;             // per bucket: parameters whose contributions are not complete
    std::vector<uint64_t> posted;         // per bucket: message number
    int64_t next_post = 0, next_sum = 0;  // buckets
    int64_t first_area = 0;               // area of bucket 0
  };
  static constexpr double kAnyScale = -1;
  enum ParameterFlag : uint8_t { kPresent = 1, kWide = 2, kFrozen = 4, kZeroed = 8, kCopied = 16 };

  void before_accumulate(int64_t parameter) override;
  void after_accumulate(int64_t parameter) override;
  void end_pass() override;
  void abandon_pass() override;

  void begin_pass(bool deferred);
  void end_synchronised_pass();
  void end_deferred_pass();
  void throw_if_broken() const;
  [[noreturn]] void break_off(const c10::DistBackendError& error);  // later calls throw the same text at once
  bool is_frozen(int64_t parameter) const;
  bool detect_zeroed(int64_t parameter) const;
  void install_hooks();
  void settle_scale(uint64_t seq);

  // exchange (reducer_exchange.cpp)
  void lay_out_areas();
  void advance(bool may_wait);
  bool area_is_free(int64_t bucket, bool wait);
  void copy_leaf(int64_t bucket, int64_t placement);
  at::Tensor take_leaf(int64_t p);
  void post_bucket(int64_t bucket);
  void sum_bucket(int64_t bucket);
  void compare_records(int64_t bucket, uint64_t seq);
  std::byte* leaf_data(int64_t bucket, int64_t placement, bool wide, int rank) const;
  void gather_gradients();
  void place_placeholder(int64_t parameter);

  std::shared_ptr<ShardedModel> model_;
  std::vector<at::Tensor> shards_, gradients_, placeholders_, shard_placeholders_, deferred_, shown_;
  std::vector<bool> has_gradient_, placeholder_set_, shard_gradient_set_;
  std::vector<int64_t> gradient_versions_;
  std::vector<int> expected_;  // contributions per pass, learnt
  bool learnt_ = false, base_is_zero_ = false;
  std::vector<uint8_t> zeroed_;    // per parameter: zeroed alone since the last pass, to be compared between ranks
  std::vector<PartialSums> sums_;  // per bucket
  GradientRecord record_;
  std::shared_ptr<BackwardTracker> tracker_;
  std::unique_ptr<GradientHooks> hooks_;
  std::unique_ptr<comm::Channel> channel_;

  std::shared_ptr<comm::Region> areas_;
  int64_t area_count_ = 1, area_cursor_ = 0;
  size_t area_bytes_ = 0;
  std::vector<size_t> narrow_offset_, wide_offset_;  // per parameter, bytes in its bucket's area
  std::vector<uint64_t> area_user_;                  // message that last used the area
  std::vector<int64_t> area_touched_;                // bytes of the largest bucket that used it

  std::optional<Pass> pass_;
  int64_t passes_ = 0;
  int no_sync_ = 0;
  uint32_t deferred_passes_ = 0;
  double deferred_scale_ = -1, tree_scale_ = -1;  // -1: no pass yet
  double scale_ = 0;
  bool finished_ = false;
  std::string taint_;        // until zero
  std::string broken_;       // for good
  std::string local_error_;  // to be told to all ranks with the next message
  bool error_told_ = false;
  ReducerCounters counters_;
};

}  // namespace trueshard::engine
