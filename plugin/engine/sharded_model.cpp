// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/sharded_model.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/interposer.h"
#include "plugin/engine/parallel.h"

namespace trueshard::engine {

namespace {

constexpr size_t kAlignment = 64;  // bytes
size_t aligned(int64_t bytes) { return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment; }

plan::ShardPlan make_plan(const std::vector<Parameter>& parameters, int world, int64_t bucket_bytes) {
  std::vector<plan::ParameterSpec> specs;
  for (const auto& p : parameters) {
    specs.push_back({p.name, p.numel, static_cast<int64_t>(c10::elementSize(p.compute_dtype)),
                     static_cast<int64_t>(c10::elementSize(p.master_dtype))});
  }
  return plan::make_shard_plan(std::move(specs), world, bucket_bytes);
}

std::vector<Parameter> make_parameters(const ModuleView& view, const std::vector<int>& groups,
                                       const ShardOptions& options) {
  std::vector<Parameter> parameters;
  const auto wanted = options.mp_policy().param_dtype();
  for (size_t i = 0; i < view.parameters.size(); ++i) {
    const auto& named = view.parameters[i];
    Parameter p;
    p.name = named.name;
    p.other_names = named.other_names;
    p.tensor = named.tensor;
    p.storage = named.tensor.storage();
    p.sizes = named.tensor.sizes().vec();
    p.strides = named.tensor.strides().vec();
    p.numel = named.tensor.numel();
    p.group = groups[i];
    const auto dtype = named.tensor.scalar_type();
    p.master_dtype = master_dtype_of(dtype);
    p.compute_dtype = wanted && !named.full_precision && dtype != c10::kDouble ? *wanted : dtype;
    p.low_precision_master = options.low_precision_master() && is_16bit(dtype);
    if (p.low_precision_master) p.compute_dtype = dtype;
    p.separate_master =
        options.stage() == Stage::Zero3 || (p.compute_dtype != p.master_dtype && !p.low_precision_master);
    parameters.push_back(std::move(p));
  }
  return parameters;
}

// Which model manages a tensor; all models of the process.
struct Owners {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, const ShardedModel*> of;
};
Owners& owners() {
  static auto* all = new Owners;  // outlives models in static objects
  return *all;
}

}  // namespace

bool managed_by_an_optimizer(const at::Tensor& tensor) {
  auto& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.of.find(tensor.unsafeGetTensorImpl());
  if (found == all.of.end()) return false;
  for (const auto& p : found->second->parameters()) {
    if (p.tensor.is_same(tensor)) return p.group >= 0;
  }
  return false;
}

bool ShardedModel::manages(int64_t parameter) const {
  auto& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.of.find(parameters_[parameter].tensor.unsafeGetTensorImpl());
  return found != all.of.end() && found->second == this;
}

void ShardedModel::claim() {
  auto& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& p : parameters_) {
    auto& owner = all.of[p.tensor.unsafeGetTensorImpl()];
    if (owner == nullptr || p.group >= 0) owner = this;
  }
}

void ShardedModel::release() {
  auto& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.of, [this](const auto& entry) { return entry.second == this; });
}

ShardedModel::ShardedModel(std::shared_ptr<comm::Transport> transport, const std::string& name, const ModuleView& view,
                           const std::vector<int>& groups, const ShardOptions& options)
    : transport_(std::move(transport)),
      name_(name),
      options_(options),
      parameters_(make_parameters(view, groups, options)),
      buffers_(view.buffers),
      plan_(make_plan(parameters_, transport_->size(), options.bucket_bytes())),
      norm_plan_(plan_) {
  if (options_.share_parameters() && can_share()) {
    bool any = false;
    for (auto& p : parameters_) {
      p.shared = keeps_compute_copies() || p.stored_dtype() == p.compute_dtype;
      any |= p.shared && p.numel > 0;
    }
    for (auto& p : parameters_) p.shared &= any;
  }
  plan_memory();
  allocate_memory();
  claim();
  if (!keeps_compute_copies()) make_gatherer();
  fill_memory();
  // Last, and collective: all ranks have filled their memory.
  gradient_region_ = transport_->allocate(name_ + "/gradients", gradient_bytes_);
}

bool ShardedModel::can_share() {
  if (replicated() || (keeps_compute_copies() && world() == 1)) return false;
  const bool works = comm::PrivateView::works();
  if (!works) {
    static std::once_flag once;
    std::call_once(once, [] {
      LOG(WARNING) << "trueshard: this system does not tell which pages of a private mapping were written to "
                      "(/proc/self/pagemap), so every rank holds its own copy of the parameters, which costs memory "
                      "and time";
    });
  }
  const auto votes = transport_->allocate(name_ + "/can share", works ? 1 : 0);
  bool all = true;
  for (int r = 0; r < world(); ++r) all &= votes->bytes(r) > 0;
  return all;
}

ShardedModel::~ShardedModel() {
  if (!keeps_compute_copies()) {  // the gatherer goes on for the parameters' sake
    release();
    return;
  }
  // The regions go away with this object (other holders of the tensors keep them alive): hand every parameter a copy of
  // its own.
  for (int64_t i = 0; i < size(); ++i) {
    auto& p = parameters_[i];
    if (p.numel == 0 || !manages(i) || !attached(i)) continue;
    try {
      const size_t bytes = static_cast<size_t>(p.numel * compute_itemsize(i));
      auto memory = c10::GetAllocator(c10::kCPU)->allocate(bytes);
      std::memcpy(memory.get(), visible(i), bytes);
      attach_to(i, std::move(memory), p.compute_dtype);
    } catch (const std::exception&) {
      // Out of memory: the tensor keeps the region alive instead (attach() gave it a reference).
    }
  }
  release();
}

void ShardedModel::plan_memory() {
  master_offsets_.assign(world(), std::vector<size_t>(parameters_.size(), 0));
  master_bytes_.assign(world(), 0);
  gradient_offsets_.assign(parameters_.size(), 0);
  size_t gradient_bytes = 0;
  for (const auto& bucket : plan_.buckets) {
    for (const auto& placement : bucket.placements) {
      auto& p = parameters_[placement.parameter];
      p.compute_offset = compute_bytes_;
      if (keeps_compute_copies() || p.shared)
        compute_bytes_ += aligned(p.numel * compute_itemsize(placement.parameter));
      const bool in_common = p.shared && !keeps_compute_copies();
      if (in_common)
        own_shared_bytes_ += owned(placement.parameter, rank()).size() * compute_itemsize(placement.parameter);
      for (int r = 0; r < world(); ++r) {
        master_offsets_[r][placement.parameter] = master_bytes_[r];
        if (!p.separate_master || in_common) continue;
        const auto item = static_cast<int64_t>(c10::elementSize(p.stored_dtype()));
        master_bytes_[r] += aligned(owned(placement.parameter, r).size() * item);
      }
      const int64_t start = replicated() ? placement.offset : plan_.piece(placement.parameter, rank()).shard_offset;
      gradient_offsets_[placement.parameter] = gradient_bytes + static_cast<size_t>(start * bucket.master_itemsize);
    }
    gradient_bytes += static_cast<size_t>((replicated() ? bucket.padded : bucket.shard) * bucket.master_itemsize);
  }
  gradient_bytes_ = gradient_bytes;
}

void ShardedModel::allocate_memory() {
  if (std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) { return p.shared; })) {
    compute_region_ =
        transport_->allocate(name_ + "/parameters", rank() == 0 ? compute_bytes_ : 0, comm::Views::kPrivate);
    view_ = compute_region_->view(0);
  } else {
    compute_region_ = transport_->allocate(name_ + "/parameters", compute_bytes_);
  }
  master_region_ = transport_->allocate(name_ + "/masters", master_bytes_[rank()]);
}

// What this optimizer does not manage stays where it is: no unit holds it.
void ShardedModel::make_gatherer() {
  install_interposer();
  GathererParts parts;
  std::vector<plan::UnitSpec> specs;
  for (int64_t i = 0; i < size(); ++i) {
    const auto& p = parameters_[i];
    GatherSpec spec{p.name, p.compute_dtype, p.stored_dtype(), manages(i) ? p.numel : 0, {}};
    if (p.shared && spec.numel > 0) spec.view = visible(i);
    for (int r = 0; r < world() && spec.numel > 0; ++r) {
      const auto range = owned(i, r);
      if (!range.empty()) spec.pieces.push_back({master(i, r), range, r == rank()});
    }
    specs.push_back({name_for_unit(p.name, p.other_names, options_), spec.numel * compute_itemsize(i)});
    parts.parameters.push_back(std::move(spec));
  }
  parts.units = plan::make_unit_plan(specs, {options_.units(), options_.unit_bytes()});
  int64_t largest = 0;
  for (const auto& unit : parts.units.units) largest = std::max(largest, unit.bytes);
  parts.resident_bytes = options_.resident_bytes().value_or(2 * (largest + 64 * size()));
  parts.prefetch_units = options_.prefetch_units();
  parts.epoch = std::make_unique<MasterEpoch>(transport_, name_);
  parts.memory =
      std::make_shared<std::array<std::shared_ptr<comm::Region>, 2>>(std::array{master_region_, compute_region_});
  parts.view = view_;
  gatherer_ = std::make_shared<UnitGatherer>(std::move(parts));
}

// Frees the module's own memory as it goes: the module is never held whole twice.
void ShardedModel::fill_memory() {
  for (int64_t i = 0; i < size(); ++i) {
    auto& p = parameters_[i];
    if (p.numel > 0) {
      const PinnedStorage whole(p.tensor.storage().unsafeGetStorageImpl());  // another optimizer may have freed it
      const auto* values = static_cast<const std::byte*>(p.tensor.const_data_ptr());
      if (views_common(i)) {
        store_master(i, values, p.tensor.scalar_type());
        write_common(i, values, p.tensor.scalar_type());
      } else {
        store(i, values, p.tensor.scalar_type());
      }
    }
    if (manages(i)) attach(i);
    p.version = p.tensor._version();
  }
  masters_changed();
}

plan::Range ShardedModel::owned(int64_t parameter, int rank) const {
  return replicated() ? plan::Range{0, parameters_[parameter].numel} : piece(parameter, rank);
}
std::byte* ShardedModel::compute(int64_t parameter, int rank) const {
  const auto& p = parameters_[parameter];
  return compute_region_->data(p.shared ? 0 : rank) + p.compute_offset;
}
std::byte* ShardedModel::visible(int64_t parameter) const {
  const auto& p = parameters_[parameter];
  return p.shared ? view_->data() + compute_region_->view_offset(0) + p.compute_offset : compute(parameter, rank());
}
std::byte* ShardedModel::master(int64_t parameter, int rank) const {
  const auto& p = parameters_[parameter];
  if (!p.separate_master || (p.shared && !keeps_compute_copies())) {
    return compute(parameter, rank) + owned(parameter, rank).begin * compute_itemsize(parameter);
  }
  return master_region_->data(rank) + master_offsets_[rank][parameter];
}
std::byte* ShardedModel::gradient(int64_t parameter) const {
  return gradient_region_->data(rank()) + gradient_offsets_[parameter];
}
std::byte* ShardedModel::peer_gradient(int64_t parameter, int rank) const {
  return gradient_region_->data(rank) + gradient_offsets_[parameter];
}
int64_t ShardedModel::master_itemsize(int64_t parameter) const {
  return static_cast<int64_t>(c10::elementSize(parameters_[parameter].master_dtype));
}
int64_t ShardedModel::compute_itemsize(int64_t parameter) const {
  return static_cast<int64_t>(c10::elementSize(parameters_[parameter].compute_dtype));
}

at::Tensor ShardedModel::tensor_over(std::byte* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                                     c10::ScalarType dtype) const {
  auto keep = std::make_shared<std::array<std::shared_ptr<comm::Region>, 3>>(
      std::array{compute_region_, master_region_, gradient_region_});
  return at::from_blob(
      data, sizes, strides, [keep](void*) {}, at::TensorOptions().dtype(dtype));
}
at::Tensor ShardedModel::flat_tensor_over(std::byte* data, int64_t count, c10::ScalarType dtype) const {
  return tensor_over(data, {count}, {1}, dtype);
}

void ShardedModel::round_to_compute(int64_t parameter) {
  const auto& p = parameters_[parameter];
  const auto range = owned(parameter, rank());
  if (!p.separate_master || !keeps_compute_copies() || range.empty()) return;
  const auto in = kernel_dtype(p.master_dtype), out = kernel_dtype(p.compute_dtype);
  const std::byte* from = master(parameter, rank());
  std::byte* to = compute(parameter, rank()) + range.begin * compute_itemsize(parameter);
  for_blocks(range.size(), [&](int64_t begin, int64_t end) {
    kernels::kernels().cast(from + begin * kernels::itemsize(in), in, to + begin * kernels::itemsize(out), out,
                            end - begin);
  });
}

MemoryMetrics ShardedModel::memory() const {
  MemoryMetrics memory;
  memory.parameters = static_cast<int64_t>(compute_bytes_) / (view_ ? world() : 1);
  if (gatherer_) memory.parameters = gatherer_->resident_bytes();
  memory.masters = static_cast<int64_t>(master_bytes_[rank()]) + own_shared_bytes_;
  memory.gradients = static_cast<int64_t>(gradient_bytes_);
  return memory;
}

std::string describe_upcast(const ShardedModel& model) {
  int64_t count = 0, elements = 0;
  std::string first;
  for (const auto& p : model.parameters()) {
    if (!is_16bit(p.compute_dtype) || p.low_precision_master || model.options().mp_policy().param_dtype()) continue;
    if (count++ == 0) first = p.name;
    elements += p.numel;
  }
  if (count == 0) return {};
  std::ostringstream text;
  text << "trueshard: " << count << " parameters are 16-bit (first: '" << first << "', " << elements
       << " elements in all); they get fp32 masters, which cost " << 4 * elements << " bytes over all ranks"
       << (model.replicated() ? " on each rank" : "") << ". ShardOptions().low_precision_master(true) trains without.";
  return text.str();
}

}  // namespace trueshard::engine
