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
  explicit Pins(const c10::OperatorHandle& op) : op_(op) {}
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (const auto& pin : pins_) pin.managed.gatherer->unpin(pin.managed.parameter);
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
  // The operator has not thrown.
  void note_writes() const {
    for (const auto& pin : pins_) {
      if (pin.written) pin.managed.gatherer->note_write(pin.managed.parameter);
    }
  }

 private:
  struct Pin {
    Managed managed;
    bool written;
  };
  void add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.key_set().has(kKey) || !tensor.has_storage()) return;
    auto managed = find_managed(tensor.storage().unsafeGetStorageImpl());
    if (managed.gatherer == nullptr) return;
    check(tensor, managed.gatherer->spec(managed.parameter));
    managed.gatherer->pin(managed.parameter);
    pins_.push_back({std::move(managed), written});
  }
  void check(const at::Tensor& tensor, const GatherSpec& spec) const {
    TORCH_CHECK(tensor.element_size() == static_cast<int64_t>(c10::elementSize(spec.compute_dtype)),
                "trueshard: a view of parameter '", spec.name, "' is ", c10::toString(tensor.scalar_type()),
                ", the parameter is ", c10::toString(spec.compute_dtype),
                " now; views from inside a FullParametersGuard end with it, take the view anew");
    const auto& name = op_.schema().name();
    TORCH_CHECK(
        name.rfind("c10d::", 0) != 0 && name.rfind("_c10d_functional", 0) != 0, "trueshard: ", name,
        " would use parameter '", spec.name,
        "' after it has returned, but it is sharded (Stage::Zero3) and may be freed by then; communicate inside a "
        "FullParametersGuard, or use a copy (clone())");
  }
  const c10::OperatorHandle& op_;
  c10::SmallVector<Pin, 8> pins_;
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

bool belongs_to_libtorch(const c10::OperatorHandle& op) { return op.schema().name().rfind("aten::", 0) == 0; }

void interpose(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Pins pins(op);
  if (!is_view(op)) {
    const auto& arguments = op.schema().arguments();
    const auto values = torch::jit::last(*stack, arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      pins.add(values[i], alias != nullptr && alias->isWrite());
    }
  }
  const NoAutocastCache no_cache;
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (belongs_to_libtorch(op)) {
    // It uses its arguments only. Others' operators may use any parameter, and are watched inside as well.
    const c10::impl::ExcludeDispatchKeyGuard exclude{c10::DispatchKeySet(kKey)};
    op.redispatchBoxed(below, stack);
  } else {
    op.redispatchBoxed(below, stack);
  }
  pins.note_writes();
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
