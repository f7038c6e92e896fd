// SPDX-License-Identifier: BSD-3-Clause
// Role: saves and loads the whole state of a training run: sharded parameters and optimizer state, scaler, schedule,
// random numbers, and the program's own values. A checkpoint is a folder of safetensors files with a manifest; it does
// not depend on the number of ranks or the stage that wrote it (docs/checkpoints.md).
// Invariants: I1 a save becomes visible in one act, when all of it is written, synced and checked; until then, and
// after any failure, what was there before is untouched. I2 loading is strict both ways and all or nothing, on all
// ranks. I3 what is loaded has the bits that were saved. Threads: collective: all ranks of the group call them, one
// thread at a time. Errors: c10::Error, the same on all ranks, naming the file, the tensor and what to do;
// c10::DistBackendError when a rank is lost.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/schedulers/lr_scheduler.h>

#include <trueshard/grad_scaler.h>
#include <trueshard/sharded_optimizer.h>

namespace trueshard {

namespace checkpoint {
struct Target;
class BackgroundSave;
}  // namespace checkpoint

// Names the parts of a program's state. Holds references: what is added must outlive the CheckpointState.
class TRUESHARD_API CheckpointState {
 public:
  // `group`: needed only where nothing that is added has one, for programs of several ranks.
  explicit CheckpointState(c10::intrusive_ptr<c10d::ProcessGroup> group = {});
  ~CheckpointState();
  CheckpointState(const CheckpointState&) = delete;
  CheckpointState& operator=(const CheckpointState&) = delete;

  // Parameters, buffers, fp32 masters, optimizer state and group options, all by the untouched module's names.
  void add(const std::string& name, ShardedOptimizer& optimizer);
  void add(const std::string& name, ShardedGradScaler& scaler);
  // A module that is whole on every rank (EMA, a plain module to evaluate). Rank 0's is saved. Loading one under the
  // name of a saved optimizer takes the weights and buffers only.
  void add(const std::string& name, torch::nn::Module& module);
  void add(const std::string& name, torch::jit::Module& module);
  void add(const std::string& name, torch::optim::LRScheduler& scheduler);  // its step count; rates are the optimizer's
  // The program's own values, the same on all ranks.
  void add(const std::string& name, int64_t& value);
  void add(const std::string& name, double& value);
  void add(const std::string& name, bool& value);
  void add(const std::string& name, std::string& value);
  void add(const std::string& name, torch::Tensor& value);

  const std::vector<checkpoint::Target>& targets() const { return *targets_; }  // for the library's own parts
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

 private:
  checkpoint::Target& add_target(const std::string& name);
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::unique_ptr<std::vector<checkpoint::Target>> targets_;
};

struct TRUESHARD_API CheckpointOptions {
  // true: the call returns as soon as this rank's part is copied; the writing goes on beside training, with that copy
  // as its only memory. One at a time: the next save or load waits for it first, and throws its error if nobody has
  // seen it. A program that ends waits for it, too.
  TORCH_ARG(bool, asynchronous) = false;
  // Bytes in one write or read; where a copy is needed on the way (parameters with permuted strides), its size.
  TORCH_ARG(int64_t, staging_bytes) = int64_t{8} << 20;
};

struct TRUESHARD_API LoadOptions {
  // Loading is strict: each name that the checkpoint lacks, or that the program does not have, is an error that shows
  // it ("trainer/enc.0.weight", "scaler"). Names listed here are let pass; a last '*' stands for any rest.
  TORCH_ARG(std::vector<std::string>, allow_missing);     // keep the program's values
  TORCH_ARG(std::vector<std::string>, allow_unexpected);  // stay unread
  TORCH_ARG(int64_t, staging_bytes) = int64_t{8} << 20;
};

// A save that was begun.
class TRUESHARD_API SaveHandle {
 public:
  SaveHandle() = default;  // of a save that is done
  explicit SaveHandle(std::shared_ptr<checkpoint::BackgroundSave> save) : save_(std::move(save)) {}
  bool done() const;  // visible, or failed
  void wait() const;  // until then; throws the save's error, the same on all ranks. Not collective.

 private:
  std::shared_ptr<checkpoint::BackgroundSave> save_;
};

// Replaces a checkpoint of the same name.
TRUESHARD_API SaveHandle save_checkpoint(const std::string& folder, const CheckpointState& state,
                                         const CheckpointOptions& options = {});
TRUESHARD_API void load_checkpoint(const std::string& folder, const CheckpointState& state,
                                   const LoadOptions& options = {});

// Weights and buffers from elsewhere, by name: safetensors (a file, a folder, a checkpoint of this library, what
// PyTorch's DCP wrote through its HuggingFaceStorageWriter), a TorchScript file, a module saved with torch::save, a
// plain dictionary of tensors saved with torch.save. Strict by name ("enc.0.weight"); values are taken as they are or
// widened exactly. Optimizer state stays as it is: the one of torch::save is loaded into the plain optimizer before
// shard().
TRUESHARD_API void load_weights(const std::string& path, ShardedOptimizer& optimizer, const LoadOptions& options = {});
TRUESHARD_API void load_weights(const std::string& path, torch::nn::Module& module, const LoadOptions& options = {});

}  // namespace trueshard
