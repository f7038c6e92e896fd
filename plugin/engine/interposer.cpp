// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/interposer.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "plugin/engine/unit_gatherer.h"

namespace trueshard::engine {

namespace {

// libtorch's header calls it an out-of-core key; the project that used it has ended.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

class Pins {
 public:
  Pins() = default;
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (const auto& managed : pinned_) managed.gatherer->unpin(managed.parameter);
  }
  void add(const c10::IValue& value, bool written) {
    if (value.isTensor()) {
      add(value.toTensor(), written);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor, written);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) add(element, written);
    } else if (value.isTuple()) {
      for (const c10::IValue& element : value.toTupleRef().elements()) add(element, written);
    }
  }

 private:
  void add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.key_set().has(kKey) || !tensor.has_storage()) return;
    const auto managed = find_managed(tensor.storage().unsafeGetStorageImpl());
    if (managed.gatherer == nullptr) return;
    managed.gatherer->pin(managed.parameter);
    pinned_.push_back(managed);
    if (written) managed.gatherer->note_write(managed.parameter);
  }
  c10::SmallVector<Managed, 8> pinned_;
};

// Autocast keeps the 16-bit copies of leaves until its outermost exit: whole parameters would stay with them.
class NoAutocastCache {
 public:
  NoAutocastCache() : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
    if (was_enabled_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoAutocastCache() {
    if (was_enabled_) at::autocast::set_autocast_cache_enabled(true);
  }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool was_enabled_;
};

// Looks at sizes and strides only. Operators made of others (reshape, contiguous) may copy: not these.
bool is_view(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  if (returns.empty() || op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  for (const auto& result : returns) {
    if (result.alias_info() == nullptr || result.alias_info()->isWrite()) return false;
  }
  return true;
}

void interpose(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Pins pins;
  if (!is_view(op)) {
    const auto& arguments = op.schema().arguments();
    const auto values = torch::jit::last(*stack, arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      pins.add(values[i], alias != nullptr && alias->isWrite());
    }
  }
  const NoAutocastCache no_cache;
  const c10::impl::ExcludeDispatchKeyGuard exclude{c10::DispatchKeySet(kKey)};
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// There is no public setter for a key.
struct KeySetter : c10::TensorImpl {
  static void add(c10::TensorImpl* tensor) {
    const auto member = &KeySetter::key_set_;
    tensor->*member = (tensor->*member).add(kKey);
  }
};

}  // namespace

void install_interposer() {
  // Never taken back: code of libtorch may hold operators that were resolved to it.
  static const bool installed = [] {
    try {
      static auto* handle = new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
          kKey, c10::KernelFunction::makeFromBoxedFunction<&interpose>(), "trueshard"));
      return handle != nullptr;
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "trueshard shard: Stage::Zero3 needs the dispatch key ", c10::toString(kKey),
                  ", which another library in this process has taken (", error.what_without_backtrace(),
                  "); use Stage::Zero2, or load one of the two only");
    }
  }();
  (void)installed;
}

void watch(const at::Tensor& tensor) { KeySetter::add(tensor.unsafeGetTensorImpl()); }
bool is_watched(const at::Tensor& tensor) { return tensor.key_set().has(kKey); }

}  // namespace trueshard::engine
