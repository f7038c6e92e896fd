// SPDX-License-Identifier: BSD-3-Clause
// Role: shard() takes an ordinary module and an ordinary optimizer over its parameters and returns an optimizer that
// trains the module data-parallel, its state sharded by stage. Model and loop stay as they are.
// Invariants: I1 forward, backward and the names, shapes and identity of parameters are untouched. I2 param_groups()
// holds this rank's
//             fp32 shards, one per parameter (maybe empty); their grad() is the reduced gradient after
//             finish_reduction(). I3 every rank makes the same calls in the same order. I4 an error leaves weights and
//             optimizer state as they were.
// Shapes: a shard is 1-D, fp32 (fp64 for fp64 parameters); empty on ranks that own nothing of the parameter.
// Threads: one thread at a time per optimizer; backward may run on another thread than step().
// Errors: c10::Error, the same on every rank, saying where, which rank, got, expected and what to do.
#pragma once
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <trueshard/export.h>
#include <trueshard/metrics.h>
#include <trueshard/shard_options.h>

namespace torch::jit {
struct Module;
}

namespace trueshard {

namespace optim {
class Session;  // the implementation
}

class TRUESHARD_API ShardedOptimizer : public torch::optim::Optimizer {
 public:
  explicit ShardedOptimizer(std::unique_ptr<optim::Session> session);
  ~ShardedOptimizer() override;

  // Steps the shards with the wrapped optimizer's own arithmetic and gives every rank the new parameters. Calls
  // finish_reduction(). Gradients that are still scaled are an error that names ShardedGradScaler::step.
  torch::Tensor step(LossClosure closure = nullptr) override;
  // set_to_none: gradients become undefined. Otherwise those that exist become +0.0 and stay. Not collective.
  void zero_grad(bool set_to_none = true);
  // Ends the reduction of all passes so far; afterwards the shards' grad() is the mean over all leaves. Collective;
  // cheap when done.
  void finish_reduction();
  // Counts as a backward pass in which this rank has no gradient at all (uneven inputs). Collective with the others'
  // pass.
  void empty_pass();

  Metrics metrics() const;
  const ShardOptions& options() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const;

  // As torch::optim::Optimizer's, after applying unscale and clip factors that wait for the step, so that grad() shows
  // the result.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups();
  std::vector<torch::Tensor>& parameters();

  // Not supported: make the groups before shard().
  void add_param_group(const torch::optim::OptimizerParamGroup&);
  // Not supported: a shard is not a model. full_state_dict() gives whole tensors by name.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  optim::Session& session() { return *session_; }  // for the library's own parts
  const optim::Session& session() const { return *session_; }

 private:
  friend class optim::Session;
  std::unique_ptr<optim::Session> session_;
};

// Type-erased form. `module` must outlive the result. Collective.
TRUESHARD_API std::unique_ptr<ShardedOptimizer> shard(torch::nn::Module& module,
                                                      std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                      const ShardOptions& options = {});
TRUESHARD_API std::unique_ptr<ShardedOptimizer> shard(torch::jit::Module& module,
                                                      std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                      const ShardOptions& options = {});
// Leaves one parameter in a moved-from optimizer whose use throws and says to step the sharded one.
TRUESHARD_API void poison_moved_from(torch::optim::Optimizer& moved_from, const torch::optim::Optimizer& now);

// All ranks start with rank 0's parameters and buffers. The optimizer is moved in: its groups, options and state are
// kept.
template <typename Module, typename Optimizer,
          typename = std::enable_if_t<std::is_base_of_v<torch::optim::Optimizer, Optimizer> &&
                                      !std::is_lvalue_reference_v<Optimizer>>>
std::unique_ptr<ShardedOptimizer> shard(Module& module, Optimizer&& optimizer,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                        const ShardOptions& options = {}) {
  auto owned = std::make_unique<Optimizer>(std::move(optimizer));
  poison_moved_from(optimizer, *owned);
  if constexpr (std::is_base_of_v<torch::nn::Module, Module>) {
    return shard(static_cast<torch::nn::Module&>(module), std::unique_ptr<torch::optim::Optimizer>(std::move(owned)),
                 group, options);
  } else {
    return shard(static_cast<torch::jit::Module&>(module), std::unique_ptr<torch::optim::Optimizer>(std::move(owned)),
                 group, options);
  }
}

// While it lives, backward passes are not synchronised: their gradients add up locally in fp32, left to right, and
// enter the next synchronised pass as part of its leaf. Whether a pass is deferred is decided when its backward runs.
// Guards nest.
class TRUESHARD_API NoSyncGuard {
 public:
  explicit NoSyncGuard(ShardedOptimizer& optimizer);
  ~NoSyncGuard();
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  ShardedOptimizer& optimizer_;
};

}  // namespace trueshard
