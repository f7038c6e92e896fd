// SPDX-License-Identifier: BSD-3-Clause
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/entry_points.h"
#ifdef TRUESHARD_X86_TABLES
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

TRUESHARD_KERNEL_ENTRY_POINTS(reference)
TRUESHARD_KERNEL_ENTRY_POINTS(cpu_scalar)
TRUESHARD_KERNEL_ENTRY_POINTS(cpu_avx2)
TRUESHARD_KERNEL_ENTRY_POINTS(cpu_avx512)

namespace trueshard::kernels {
namespace {

// Round to nearest, no flush to zero, exceptions masked, for the life of the object; then the caller's state, its
// sticky exception flags included. The guarded functions live in other translation units and are called through a
// pointer, so the compiler cannot move their arithmetic across the guard.
class DefaultFloatState {
 public:
  DefaultFloatState(const DefaultFloatState&) = delete;
  DefaultFloatState& operator=(const DefaultFloatState&) = delete;
#ifdef TRUESHARD_X86_TABLES
  DefaultFloatState() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~DefaultFloatState() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefaultMxcsr = 0x1f80;
  unsigned saved_;
#else
  DefaultFloatState() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatState() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

template <auto kFunction>
struct Guarded;
template <typename... Args, void (*kFunction)(Args...)>
struct Guarded<kFunction> {
  static void call(Args... args) {
    DefaultFloatState state;
    void (*volatile function)(Args...) = kFunction;  // volatile: not inlined, whatever link-time optimisation does
    function(args...);
  }
};

#define TRUESHARD_TABLE(isa, space)                                                                           \
  Kernels {                                                                                                   \
    isa, Guarded<space::sum_tree>::call, Guarded<space::cast>::call, Guarded<space::unscale_and_check>::call, \
        Guarded<space::scale>::call, Guarded<space::norm_blocks>::call, Guarded<space::adam>::call,           \
        Guarded<space::sgd>::call                                                                             \
  }

constexpr Kernels kTables[] = {
    TRUESHARD_TABLE(Isa::kReference, reference),
    TRUESHARD_TABLE(Isa::kScalar, cpu_scalar),
#ifdef TRUESHARD_X86_TABLES
    TRUESHARD_TABLE(Isa::kAvx2, cpu_avx2),
    TRUESHARD_TABLE(Isa::kAvx512, cpu_avx512),
#endif
};

// __builtin_cpu_supports answers for the processor and for what the operating system saves (XCR0) together.
bool runs_here(Isa isa) {
  switch (isa) {
    case Isa::kReference:
    case Isa::kScalar:
      return true;
#ifdef TRUESHARD_X86_TABLES
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return runs_here(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    default:
      return false;
#endif
  }
  return false;
}

std::string names(const std::vector<Isa>& isas) {
  std::string text;
  for (Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(name(isa));
  return text;
}

const Kernels& choose() {
  const std::vector<Isa> isas = available_isas();
  const char* wanted = std::getenv("TRUESHARD_ISA");
  if (wanted == nullptr || *wanted == '\0') return kernels(isas.back());
  for (Isa isa : isas) {
    if (std::string(wanted) == name(isa)) return kernels(isa);
  }
  throw std::invalid_argument("trueshard kernels: TRUESHARD_ISA is '" + std::string(wanted) +
                              "', this processor runs " + names(isas) + "; set one of these or unset TRUESHARD_ISA");
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      return "reference";
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Kernels& table : kTables) {
    if (runs_here(table.isa)) isas.push_back(table.isa);
  }
  return isas;
}

const Kernels& kernels(Isa isa) {
  for (const Kernels& table : kTables) {
    if (table.isa == isa && runs_here(isa)) return table;
  }
  throw std::invalid_argument("trueshard kernels: no table '" + std::string(name(isa)) +
                              "' here, this processor runs " + names(available_isas()) +
                              "; ask available_isas() first");
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace trueshard::kernels
