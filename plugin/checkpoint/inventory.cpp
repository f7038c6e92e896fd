// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/inventory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <mutex>

namespace trueshard::checkpoint {

namespace {

class Clerk {
 public:
  Clerk(const std::vector<Target>& targets, int rank, int world) : targets_(targets), rank_(rank), world_(world) {}

  Inventory take() {
    for (const auto& target : targets_) list(target);
    for (int r = 0; r < world_; ++r) {
      at::Tensor state;
      if (r == rank_) state = generator_state();
      list_whole(
          kRanksFile,
          {rank_name(r, "generator"), {}, state.defined() ? state : at::empty({generator_bytes()}, at::kByte), false},
          r);
    }
    return std::move(inventory_);
  }

 private:
  void list(const Target& target) {
    StoredEntry entry;
    entry.key = target.key;
    entry.kind = target.kind;
    const auto names = file_names(targets_, target);
    switch (target.kind) {
      case EntryKind::kOptimizer:
        entry.file = names.model;
        entry.state_file = names.state;
        inventory_.files[names.state];  // there even when nothing was stepped yet
        entry.optimizer = describe_optimizer(*target.session);
        list_optimizer(target, entry);
        break;
      case EntryKind::kModule:
        entry.file = names.model;
        list_module(target.module(), entry);
        break;
      case EntryKind::kTensor:
        TORCH_CHECK(target.tensor->defined(), "'", target.key, "' is an undefined tensor");
        entry.file = kValuesFile;
        list_whole(kValuesFile, {target.key, {}, *target.tensor, false}, 0);
        break;
      default:
        target.describe(entry);
    }
    inventory_.entries.push_back(std::move(entry));
  }

  void list_optimizer(const Target& target, StoredEntry& entry) {
    auto& session = *target.session;
    auto& model = session.model();
    for (int64_t p = 0; p < model.size(); ++p) {
      if (!model.manages(p)) continue;
      const auto& parameter = model.parameters()[static_cast<size_t>(p)];
      if (parameter.group < 0) entry.frozen_parameters.push_back(parameter.name);
      const auto view = shard_view(session, p);
      const auto dtype = stored_dtype(parameter);
      Slot slot{entry.file, parameter.name, parameter.other_names, dtype};
      list_sharded(slot, view, {model.master(p, model.rank()), {}});
      const auto* state = session.state(p);
      if (state) list_state(target, parameter, view, *state);
    }
    for (const auto& buffer : model.buffers()) list_buffer(target, entry, buffer);
  }

  void list_state(const Target& target, const engine::Parameter& parameter, const ShardView& view,
                  const torch::optim::OptimizerParamState& state) {
    const auto kind = target.session->kind();
    TORCH_CHECK(kind != optim::Kind::kUnknown, "the state of optimizer ", target.session->optimizer_type(), " ('",
                target.key, "') is of a type that can not be stored; known: Adam, AdamW, SGD, RMSprop, Adagrad");
    const auto file = file_names(targets_, target).state;
    for (const auto& field : optim::state_fields(kind, state)) {
      TORCH_CHECK(field.tensor.numel() == view.owned.size() && field.tensor.is_contiguous(), "state '", field.name,
                  "' of parameter '", parameter.name, "' has ", field.tensor.numel(), " elements, its shard ",
                  view.owned.size());
      Slot slot{file, state_name(parameter.name, field.name), {}, field.tensor.scalar_type()};
      list_sharded(slot, view, {static_cast<std::byte*>(field.tensor.data_ptr()), field.tensor});
    }
    if (const auto step = optim::state_step(kind, state))
      list_whole(file, {state_name(parameter.name, "step"), {}, at::scalar_tensor(*step, at::kLong), false}, 0);
  }

  // A save holds rank 0's buffers under their names, and every other rank's beside the generators.
  void list_buffer(const Target& target, StoredEntry& entry, const engine::NamedTensor& buffer) {
    if (!seen_.insert(buffer.tensor.unsafeGetTensorImpl()).second) return;
    entry.buffers.push_back(buffer.name);
    list_whole(entry.file, buffer, 0);
    for (int r = 1; r < world_; ++r)
      list_whole(kRanksFile, {rank_name(r, target.key + "." + buffer.name), {}, buffer.tensor, false}, r);
  }

  void list_module(const engine::ModuleView& module, StoredEntry& entry) {
    for (const auto& parameter : module.parameters) list_whole(entry.file, parameter, 0);
    for (const auto& buffer : module.buffers) {
      entry.buffers.push_back(buffer.name);
      list_whole(entry.file, buffer, 0);
    }
  }

  struct Slot {
    std::string file, name;
    std::vector<std::string> other_names;
    c10::ScalarType dtype;
  };
  struct Source {
    std::byte* data;
    at::Tensor keep;
  };

  TensorInfo& list_tensor(const Slot& slot, const std::vector<int64_t>& sizes) {
    auto& file = inventory_.files[slot.file];
    file.metadata["format"] = "pt";
    if (!slot.other_names.empty()) file.other_names[slot.name] = slot.other_names;
    file.tensors.push_back({slot.name, dtype_of(slot.dtype), sizes});
    return file.tensors.back();
  }

  void list_sharded(const Slot& slot, const ShardView& view, const Source& source) {
    list_tensor(slot, view.sizes);
    if (view.piece.empty()) return;
    const auto item = static_cast<int64_t>(c10::elementSize(slot.dtype));
    Part part{slot.file, slot.name, view.piece.begin * item, view.piece.end * item, source.data, source.keep, {}, item};
    if (view.row_major) {
      part.data += (view.piece.begin - view.owned.begin) * item;
    } else {
      part.view = std::make_shared<ShardView>(view);
    }
    inventory_.parts.push_back(std::move(part));
  }

  // `named` is written whole by one rank.
  void list_whole(const std::string& file, const engine::NamedTensor& named, int writer) {
    const auto& tensor = named.tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided && !tensor.is_quantized(), "'", named.name,
                "' is not a dense tensor and can not be stored");
    list_tensor({file, named.name, named.other_names, tensor.scalar_type()}, tensor.sizes().vec());
    if (writer != rank_ || tensor.numel() == 0) return;
    const auto plain = tensor.detach().to(at::kCPU).resolve_conj().contiguous();
    inventory_.parts.push_back({file,
                                named.name,
                                0,
                                static_cast<int64_t>(plain.nbytes()),
                                static_cast<std::byte*>(plain.data_ptr()),
                                plain,
                                {},
                                1});
  }

  static at::Tensor generator_state() {
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  }
  static int64_t generator_bytes() { return generator_state().numel(); }

  const std::vector<Target>& targets_;
  int rank_, world_;
  Inventory inventory_;
  std::unordered_set<const c10::TensorImpl*> seen_;  // buffers that several optimizers share
};

}  // namespace

Inventory take_inventory(const std::vector<Target>& targets, int rank, int world) {
  return Clerk(targets, rank, world).take();
}

}  // namespace trueshard::checkpoint
