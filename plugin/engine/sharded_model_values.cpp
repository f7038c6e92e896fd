// SPDX-License-Identifier: BSD-3-Clause
// What the module's tensors show, what their owners write to them, and how values get into masters and copies.
#include <ATen/Functions.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/interposer.h"
#include "plugin/engine/sharded_model.h"

namespace trueshard::engine {

void ShardedModel::store_master(int64_t i, const std::byte* values, c10::ScalarType dtype) {
  const auto& p = parameters_[i];
  const auto range = owned(i, rank());
  if (!p.separate_master || range.empty()) return;
  kernels::kernels().cast(values + range.begin * static_cast<int64_t>(c10::elementSize(dtype)), kernel_dtype(dtype),
                          master(i, rank()), kernel_dtype(p.stored_dtype()), range.size());
}

void ShardedModel::store(int64_t i, const std::byte* values, c10::ScalarType dtype) {
  store_master(i, values, dtype);
  if (!keeps_compute_copies() || values == visible(i)) return;
  const auto& p = parameters_[i];
  kernels::kernels().cast(values, kernel_dtype(dtype), visible(i), kernel_dtype(p.compute_dtype), p.numel);
}

void ShardedModel::write_common(int64_t i, const std::byte* values, c10::ScalarType dtype) {
  const auto& p = parameters_[i];
  const auto range = owned(i, rank());
  if (range.empty()) return;
  kernels::kernels().cast(values + range.begin * static_cast<int64_t>(c10::elementSize(dtype)), kernel_dtype(dtype),
                          compute(i, rank()) + range.begin * compute_itemsize(i), kernel_dtype(p.compute_dtype),
                          range.size());
}

void ShardedModel::restore_shape(int64_t parameter, c10::ScalarType dtype) {
  const auto& p = parameters_[parameter];
  auto* impl = p.tensor.unsafeGetTensorImpl();
  auto* storage = p.storage.unsafeGetStorageImpl();
  storage->set_nbytes(static_cast<size_t>(p.numel) * c10::elementSize(dtype));
  storage->set_resizable(false);
  if (impl->dtype() != c10::scalarTypeToTypeMeta(dtype) ||
      p.tensor.storage().unsafeGetStorageImpl() != p.storage.unsafeGetStorageImpl())
    impl->set_storage_and_dtype(p.storage, c10::scalarTypeToTypeMeta(dtype));
  if (p.tensor.sizes() != p.sizes || p.tensor.strides() != p.strides || p.tensor.storage_offset() != 0)
    impl->set_sizes_and_strides(p.sizes, p.strides, 0);
}

void ShardedModel::attach_to(int64_t parameter, at::DataPtr data, c10::ScalarType dtype) {
  if (gatherer_) gatherer_->detach(parameter);
  auto* storage = parameters_[parameter].storage.unsafeGetStorageImpl();
  storage->clear_data_ptr_access_error_msg_();  // of a ZeRO-3 optimizer that had the parameter before
  storage->set_data_ptr_noswap(std::move(data));
  restore_shape(parameter, dtype);
}

void ShardedModel::attach(int64_t parameter) {
  const auto& p = parameters_[parameter];
  if (gatherer_ && p.numel > 0) {
    gatherer_->attach(parameter, p.storage.unsafeGetStorageImpl());
    restore_shape(parameter, p.compute_dtype);
    return watch(p.tensor);
  }
  using Keep = std::pair<std::shared_ptr<comm::Region>, std::shared_ptr<comm::PrivateView>>;
  auto* keep = new Keep(compute_region_, view_);
  at::DataPtr data(
      keeps_compute_copies() ? visible(parameter) : nullptr, keep,
      [](void* context) { delete static_cast<Keep*>(context); }, c10::Device(c10::kCPU));
  attach_to(parameter, std::move(data), p.compute_dtype);
}

bool ShardedModel::attached(int64_t parameter) const {
  const auto& p = parameters_[parameter];
  auto* storage = p.storage.unsafeGetStorageImpl();
  if (p.tensor.scalar_type() != p.compute_dtype || p.tensor.sizes() != p.sizes || p.tensor.strides() != p.strides ||
      p.tensor.storage_offset() != 0 || p.tensor.storage().unsafeGetStorageImpl() != storage)
    return false;
  if (gatherer_) return gatherer_->attached(parameter, storage) && is_watched(p.tensor);
  return storage->data_ptr().get() == visible(parameter);
}

ShardedModel::Shown ShardedModel::shown(int64_t parameter) const {
  const auto& p = parameters_[parameter];
  Shown shown{PinnedStorage(p.tensor.storage().unsafeGetStorageImpl()), p.tensor.detach()};
  if (p.tensor.strides() != p.strides)
    shown.tensor = at::empty_strided(p.sizes, p.strides, shown.tensor.options()).copy_(shown.tensor);
  return shown;
}

bool ShardedModel::changed(int64_t parameter) {
  auto& p = parameters_[parameter];
  if (p.numel == 0) return false;
  if (!attached(parameter)) return true;
  if (p.shared && keeps_compute_copies()) {
    if (differs_from_common(parameter)) return true;
    p.version = p.tensor._version();
    return false;
  }
  if (gatherer_ == nullptr) return p.tensor._version() != p.version;
  if (!gatherer_->written(parameter)) return false;
  if (!gatherer_->agrees_with_masters(parameter)) return true;
  gatherer_->forget_write(parameter);  // the values that were there before
  p.version = p.tensor._version();
  return false;
}

bool ShardedModel::shows_foreign_memory(int64_t parameter) const {
  const auto& p = parameters_[parameter];
  return p.tensor.storage().unsafeGetStorageImpl() != p.storage.unsafeGetStorageImpl();
}

void ShardedModel::adopt(int64_t parameter, const std::byte* values) {
  auto& p = parameters_[parameter];
  adopt_master(parameter, values);
  if (keeps_compute_copies() && values != visible(parameter))
    std::memcpy(visible(parameter), values, static_cast<size_t>(p.numel * compute_itemsize(parameter)));
  if (!attached(parameter)) attach(parameter);
  if (gatherer_) gatherer_->forget_write(parameter);
  if (views_common(parameter)) {
    write_common(parameter, visible(parameter), p.compute_dtype);
    go_ahead(parameter);  // others may not have written theirs yet
  }
  p.version = p.tensor._version();
}

void ShardedModel::adopt_whole(int64_t parameter, const std::byte* values) {
  auto& p = parameters_[parameter];
  store(parameter, values, p.stored_dtype());
  if (!attached(parameter)) attach(parameter);
  if (views_common(parameter)) go_ahead(parameter);
  p.version = p.tensor._version();
}

void ShardedModel::show_again(int64_t parameter) {
  if (!attached(parameter)) attach(parameter);
  parameters_[parameter].version = parameters_[parameter].tensor._version();
}

void ShardedModel::look_for_writes() {
  if (view_ && keeps_compute_copies()) view_->look();
}

// An element that shows what its master rounds to was not changed: its master stays as exact as it is.
void ShardedModel::adopt_master(int64_t parameter, const std::byte* values) {
  const auto& p = parameters_[parameter];
  const auto range = owned(parameter, rank());
  if (p.stored_dtype() == p.compute_dtype || !p.separate_master)
    return store_master(parameter, values, p.compute_dtype);
  constexpr int64_t kBlock = 1024;
  std::array<std::byte, kBlock * 8> rounded, widened;
  const auto narrow = kernel_dtype(p.compute_dtype), wide = kernel_dtype(p.stored_dtype());
  const auto narrow_item = static_cast<size_t>(kernels::itemsize(narrow)),
             wide_item = static_cast<size_t>(kernels::itemsize(wide));
  for (int64_t begin = 0; begin < range.size(); begin += kBlock) {
    const auto count = static_cast<size_t>(std::min(kBlock, range.size() - begin));
    std::byte* to = master(parameter, rank()) + static_cast<size_t>(begin) * wide_item;
    const std::byte* from = values + static_cast<size_t>(range.begin + begin) * narrow_item;
    kernels::kernels().cast(to, wide, rounded.data(), narrow, static_cast<int64_t>(count));
    kernels::kernels().cast(from, narrow, widened.data(), wide, static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i) {
      if (std::memcmp(from + i * narrow_item, rounded.data() + i * narrow_item, narrow_item) != 0)
        std::memcpy(to + i * wide_item, widened.data() + i * wide_item, wide_item);
    }
  }
}

void ShardedModel::go_ahead(int64_t parameter) {
  auto& p = parameters_[parameter];
  p.ahead = true;
  p.ahead_digest = plan::digest(visible(parameter), p.numel * compute_itemsize(parameter));
}

// In what the tensor shows, or else in what was taken over since the common block was shown.
bool ShardedModel::differs_from_common(int64_t parameter) const {
  const auto& p = parameters_[parameter];
  if (p.ahead) return plan::digest(visible(parameter), p.numel * compute_itemsize(parameter)) != p.ahead_digest;
  const auto bytes = static_cast<size_t>(p.numel * compute_itemsize(parameter));
  const size_t begin = compute_region_->view_offset(0) + p.compute_offset;
  return view_->written(begin, begin + bytes) &&
         std::memcmp(visible(parameter), compute(parameter, rank()), bytes) != 0;
}

void ShardedModel::share_changes() {
  for (int64_t i = 0; i < size(); ++i) {
    if (parameters_[i].ahead) write_common(i, visible(i), parameters_[i].compute_dtype);
  }
}

void ShardedModel::show_common() {
  view_->drop();
  for (auto& p : parameters_) p.ahead = false;
}

void ShardedModel::masters_changed() {
  if (gatherer_) gatherer_->masters_changed();
}

void ShardedModel::settle() {
  if (gatherer_) gatherer_->settle();
}

}  // namespace trueshard::engine
