// SPDX-License-Identifier: BSD-3-Clause
// Role: one sharded module with its optimizer: the state behind ShardedOptimizer, and the order of a step:
// finish_reduction -> unscale -> norm and clip -> optimizer -> rounding to the compute copy -> publish.
// Invariants: I1 unscale and clip factors may wait (pending) and are applied inside the step, each with its own
// rounding; while
//             they wait, the shards' grad() throws, and every access through ShardedOptimizer applies them first. I2
//             every decision (skip, clip, error) is made from numbers that are equal on all ranks.
// Threads: one at a time. Errors: c10::Error on all ranks; nothing is half-done.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <trueshard/sharded_optimizer.h>

#include "plugin/engine/module_view.h"
#include "plugin/engine/norm_exchange.h"
#include "plugin/engine/publisher.h"
#include "plugin/engine/reducer.h"
#include "plugin/optim/known_optimizers.h"

namespace trueshard::optim {

class Session {
 public:
  // Collective: agreement on all that must be equal, rank 0's values everywhere, memory, hooks.
  Session(const engine::ModuleView& view, std::unique_ptr<torch::optim::Optimizer> optimizer,
          c10::intrusive_ptr<c10d::ProcessGroup> group, const ShardOptions& options);
  ~Session();

  // Moves groups, options, defaults and state into the ShardedOptimizer that was made from this session.
  void adopt_into(ShardedOptimizer& outer);
  const torch::optim::Optimizer& inner() const { return *inner_; }

  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure);
  // The scaler's step: unscales what is not yet unscaled, agrees on the finite check, steps or skips. True when
  // stepped.
  bool step_checked();
  void finish_reduction();
  void zero_grad(bool set_to_none);
  void empty_pass();
  void change_no_sync(int change) { reducer_->defer(change); }

  // Marks the reduced gradients unscaled; returns whether any rank has a non-finite one. Throws when it was done
  // already.
  bool unscale();
  bool unscaled() const { return unscaled_; }
  double scale() const { return reducer_->scale(); }
  // Applies waiting factors to the gradients and shows them.
  void materialize();

  struct NormResult {
    std::vector<double> values;  // per parameter (sums, or maxima)
    std::vector<bool> present;
    double factor = 1.0;  // norm = root(sum) * factor
  };
  void check_clippable();
  NormResult norm_values(const engine::NormQuery& query);
  void clip(double coefficient);
  void note_norm(double norm) { metrics_.grad_norm = norm; }

  // Full parameters.
  void enter_full();
  void leave_full();
  void broadcast_full(int source);
  bool full() const { return full_depth_ > 0; }
  std::vector<std::pair<std::string, at::Tensor>> state_dict(bool wanted);

  // Checkpoints (session_checkpoint.cpp). A parameter's state is this rank's part of it; null: none.
  void prepare_checkpoint(const char* operation);  // collective: outside changes are taken over, as before a step
  Kind kind() const { return kind_; }
  std::string optimizer_type() const;
  const std::vector<std::vector<int64_t>>& members() const { return members_; }  // per group: parameters
  torch::optim::OptimizerOptions& group_options(int64_t group);
  const torch::optim::OptimizerParamState* state(int64_t parameter) const;
  void set_state(int64_t parameter, std::unique_ptr<torch::optim::OptimizerParamState> state);
  struct StepCounts {
    int64_t steps = 0, skipped_steps = 0;
  };
  StepCounts step_counts() const { return {metrics_.steps, metrics_.skipped_steps}; }
  void set_step_counts(const StepCounts& counts);
  void publish_masters();  // collective: all masters were written; compute copies follow, on all ranks

  Metrics metrics() const;
  const ShardOptions& options() const { return options_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  engine::ShardedModel& model() { return *model_; }
  engine::Reducer& reducer() { return *reducer_; }
  std::string me() const { return reducer_->me(); }

 private:
  void agree(const engine::ModuleView& view, const std::string& name);
  void spread_initial_values(const engine::ModuleView& view);
  void make_shards();
  void shard_state();
  uint64_t changes_digest();
  void adopt_changes();
  std::string exchange_changes(const char* operation);  // collective; what differs between ranks
  void agree_on_changes(const char* operation);         // collective
  uint64_t contents_digest() const;                     // of what the parameters show
  void write_own_values(int64_t parameter, const at::Tensor& whole) const;
  bool shows_masters(int64_t parameter) const;  // under a guard: nothing was cast or reshaped
  bool check_finite(bool unscale);
  void prepare_step();
  void apply_step();
  void run_inner_step();
  void require_groups() const;

  ShardOptions options_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<comm::Transport> transport_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  Kind kind_ = Kind::kUnknown;
  std::vector<int> groups_;                    // per parameter
  std::vector<std::vector<int64_t>> members_;  // per group: parameters in the group's order (each once)
  std::shared_ptr<engine::ShardedModel> model_;
  std::vector<at::Tensor> shards_;
  std::unique_ptr<engine::Reducer> reducer_;
  std::unique_ptr<engine::Publisher> publisher_;
  std::unique_ptr<engine::NormExchange> norms_;
  ShardedOptimizer* outer_ = nullptr;
  // Parameters that changed behind the optimizer's back, as of changes_digest(). Values that lie in foreign memory,
  // which may be another parameter's, are copied before any parameter is taken over.
  struct Change {
    int64_t parameter;
    at::Tensor copy;  // undefined: the tensor's own memory has it
  };
  std::vector<Change> changes_;
  std::vector<at::Tensor> pending_stand_ins_;
  kernels::GradientFactors pending_;
  double pending_inverse_ = 1.0;  // fp64
  bool hidden_ = false;           // the shards' grad() are stand-ins because factors wait
  bool unscaled_ = false;
  double record_factor_ = 1.0;  // what the recorded norm must be multiplied by
  bool found_nonfinite_ = false;
  int full_depth_ = 0;
  std::vector<at::Tensor> full_;  // whole masters shown by a guard
  uint64_t guard_digest_ = 0, entered_digest_ = 0;
  bool diverged_ = false;  // the guard was entered while ranks had different changes
  Metrics metrics_;
};

}  // namespace trueshard::optim
