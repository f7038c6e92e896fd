// SPDX-License-Identifier: BSD-3-Clause
// Role: the memory of a sharded module: where each parameter's compute copy, master and reduced gradient lie, on this
// rank and on every other. Parameters keep their TensorImpl and StorageImpl; only what the storage points to, and its
// dtype, change. Vocabulary: whole: all elements; piece: the elements of a parameter that this rank reduces; owned:
// those it steps (the piece, or everything when replicated). Invariants: I1 compute copies and masters lie in regions
// that peers read in place. I2 each parameter starts on 64 bytes.
//             I3 a master of the same dtype as the compute copy is part of it, but for ZeRO-3, where masters are all
//             there is and compute copies come and go (unit_gatherer.h). I4 padding is never read as a gradient.
//             I5 shared parameters (ShardOptions::share_parameters) have one compute copy on the host, the common
//             block. Each rank writes its own pieces to it, and only between a meeting of all ranks and the next; the
//             tensor shows a private view of it (private_view.h), which may be ahead of it until the next step.
// Shapes: offsets in elements unless a name says bytes. Threads: immutable after construction, except the memory
// itself. Errors: c10::Error from the constructor.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include <trueshard/metrics.h>
#include <trueshard/shard_options.h>

#include "plugin/comm/transport.h"
#include "plugin/engine/module_view.h"
#include "plugin/engine/unit_gatherer.h"
#include "plugin/plan/norm_plan.h"
#include "plugin/plan/shard_plan.h"

namespace trueshard::engine {

struct Parameter {
  std::string name;
  std::vector<std::string> other_names;
  at::Tensor tensor;  // the user's
  // Its own storage and shape. set_data() puts a foreign storage in their place, which others may share: attach()
  // brings these back and leaves the foreign one alone.
  c10::Storage storage;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType compute_dtype;
  c10::ScalarType master_dtype;  // of sums, state and master (fp32 or fp64)
  int64_t numel = 0;
  int group = -1;                     // optimizer group; -1: the optimizer does not have it, it counts as frozen
  bool low_precision_master = false;  // stepped in the compute dtype
  bool separate_master = false;       // the master is not a part of the compute copy
  bool shared = false;                // one compute copy for all ranks
  // Shared: the view has values that the common block may not have yet, with this digest.
  bool ahead = false;
  uint64_t ahead_digest = 0;
  size_t compute_offset = 0;  // bytes, the same on all ranks
  int64_t version = 0;        // the tensor's version when it last agreed with its master
  // What the optimizer steps.
  c10::ScalarType stored_dtype() const { return low_precision_master ? compute_dtype : master_dtype; }
};

class ShardedModel {
 public:
  // `groups[i]`: optimizer group of view.parameters[i] or -1. Collective. Copies this rank's values (which must be
  // equal on all ranks).
  ShardedModel(std::shared_ptr<comm::Transport> transport, const std::string& name, const ModuleView& view,
               const std::vector<int>& groups, const ShardOptions& options);
  ~ShardedModel();  // gives every parameter memory of its own again

  const std::shared_ptr<comm::Transport>& transport() const { return transport_; }
  const std::string& name() const { return name_; }
  int rank() const { return transport_->rank(); }
  int world() const { return transport_->size(); }
  bool replicated() const { return options_.stage() == Stage::Replicated; }
  bool keeps_compute_copies() const { return options_.stage() != Stage::Zero3; }
  const ShardOptions& options() const { return options_; }
  const plan::ShardPlan& plan() const { return plan_; }
  const plan::NormPlan& norm_plan() const { return norm_plan_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<NamedTensor>& buffers() const { return buffers_; }
  int64_t size() const { return static_cast<int64_t>(parameters_.size()); }

  plan::Range piece(int64_t parameter, int rank) const { return plan_.piece(parameter, rank).in_parameter; }
  plan::Range owned(int64_t parameter, int rank) const;
  std::byte* compute(int64_t parameter, int rank) const;        // whole; not in ZeRO-3; shared: the same for all ranks
  std::byte* visible(int64_t parameter) const;                  // what this rank's tensor shows; not in ZeRO-3
  std::byte* master(int64_t parameter, int rank) const;         // of owned(parameter, rank), in stored_dtype()
  std::byte* gradient(int64_t parameter) const;                 // of owned(parameter, this rank)
  std::byte* peer_gradient(int64_t parameter, int rank) const;  // replicated only
  int64_t master_itemsize(int64_t parameter) const;
  int64_t compute_itemsize(int64_t parameter) const;
  // A plain tensor (not a view) over memory of this model, which it keeps alive.
  at::Tensor tensor_over(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype) const;
  at::Tensor flat_tensor_over(std::byte* data, int64_t count, c10::ScalarType dtype) const;

  // What the user's tensor shows, in the memory order of the parameter: the tensor itself (whole while the result's pin
  // lives), or a copy when set_data() gave it other strides.
  struct Shown {
    PinnedStorage pin;
    at::Tensor tensor;
    const std::byte* data() const { return static_cast<const std::byte*>(tensor.const_data_ptr()); }
  };
  Shown shown(int64_t parameter) const;
  // The user's tensor shows something else than what the masters say. Reads masters: not after ranks have met.
  bool changed(int64_t parameter);
  // The tensor shows memory of somebody else, which may be another parameter's.
  bool shows_foreign_memory(int64_t parameter) const;
  // Takes over values in the compute dtype (what the tensor shows): master, compute copy, the tensor's own storage.
  void adopt(int64_t parameter, const std::byte* values);
  // The tensor shows its parameter again, whose value is what it was.
  void show_again(int64_t parameter);
  // Takes over whole values in stored_dtype(), of which this rank keeps what it owns.
  void adopt_whole(int64_t parameter, const std::byte* values);
  // Before changed() is asked about parameters: looks for writes that bumped no version.
  void look_for_writes();
  // After all ranks met with equal changes: shared parameters that this rank has written to are its part of the common
  // block, too.
  void share_changes();
  // All ranks have written their parts of the common block: views show it again.
  void show_common();
  bool shares() const { return view_ != nullptr; }
  // Masters are complete on this rank; all ranks say so equally often, after all of them met. ZeRO-3 gathers anew.
  void masters_changed();
  void settle();  // no gather runs ahead any more: called before the ranks meet
  // Points the user's tensor at the compute copy (again), with its dtype, storage and shape.
  void attach(int64_t parameter);
  // Points it at other memory of the given dtype (whole parameter, the tensor's strides).
  void attach_to(int64_t parameter, at::DataPtr data, c10::ScalarType dtype);
  // Several optimizers may share a module: a parameter belongs to the model whose optimizer has it, else to the first.
  // Only that one keeps its memory and master; the others leave the tensor alone.
  bool manages(int64_t parameter) const;
  bool attached(int64_t parameter) const;  // the tensor still shows the compute copy, in its dtype
  // compute copy of elements [range) of the parameter = rounding of this rank's master; nothing to do when the master
  // is part of it.
  void round_to_compute(int64_t parameter);
  MemoryMetrics memory() const;  // parameters, masters, gradients
  int64_t bytes_gathered() const { return gatherer_ ? gatherer_->bytes_gathered() : 0; }
  double seconds_gathering() const { return gatherer_ ? gatherer_->seconds() : 0; }

 private:
  void plan_memory();
  bool can_share();  // collective
  void allocate_memory();
  void claim();
  void release();
  void make_gatherer();
  void fill_memory();
  bool differs_from_common(int64_t parameter) const;
  void go_ahead(int64_t parameter);
  void adopt_master(int64_t parameter, const std::byte* values);
  bool views_common(int64_t parameter) const { return parameters_[parameter].shared && keeps_compute_copies(); }
  // This rank's part of the common block, from whole values.
  void write_common(int64_t parameter, const std::byte* values, c10::ScalarType dtype);
  // This rank's part of the master, and the compute copy if there is one, from whole values.
  void store(int64_t parameter, const std::byte* values, c10::ScalarType dtype);
  void store_master(int64_t parameter, const std::byte* values, c10::ScalarType dtype);
  void restore_shape(int64_t parameter, c10::ScalarType dtype);  // and dtype, storage; not what it points to

  std::shared_ptr<comm::Transport> transport_;
  std::string name_;
  ShardOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<NamedTensor> buffers_;
  plan::ShardPlan plan_;
  plan::NormPlan norm_plan_;
  std::vector<std::vector<size_t>> master_offsets_;  // [rank][parameter], bytes in the master region
  std::vector<size_t> gradient_offsets_;             // [parameter], bytes; replicated: the same on all ranks
  size_t compute_bytes_ = 0, gradient_bytes_ = 0;
  std::vector<size_t> master_bytes_;         // [rank]
  int64_t own_shared_bytes_ = 0;             // of masters that lie in the common block
  std::shared_ptr<comm::PrivateView> view_;  // of the common block; null: nothing is shared
  std::shared_ptr<comm::Region> compute_region_, master_region_, gradient_region_;
  std::shared_ptr<UnitGatherer> gatherer_;  // ZeRO-3
};

// A sharded optimizer has this tensor already.
bool managed_by_an_optimizer(const at::Tensor& tensor);
// The log line about a 16-bit model that gets fp32 masters; empty when there is nothing to say.
std::string describe_upcast(const ShardedModel& model);

}  // namespace trueshard::engine
