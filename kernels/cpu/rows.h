// SPDX-License-Identifier: BSD-3-Clause
// Role: element types that live in registers as fp32 rows, loops over rows, and the short last row.
// Invariants: nothing outside [0, count) is read or written: a short row goes through a zero-filled local array.
// Shapes: rows of kRow elements. Threads: pure. Errors: none.
#pragma once
#include "kernels/cpu/isa.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {

struct Float32 {
  using Element = float;
  static TRUESHARD_INLINE Floats load(const Element* data) { return load_f32(data); }
  static TRUESHARD_INLINE void store(Element* data, Floats x) { store_f32(data, x); }
};
struct BFloat16 {
  using Element = uint16_t;
  static TRUESHARD_INLINE Floats load(const Element* data) { return load_bf16(data); }
  static TRUESHARD_INLINE void store(Element* data, Floats x) { store_bf16(data, x); }
};
struct Float16 {
  using Element = uint16_t;
  static TRUESHARD_INLINE Floats load(const Element* data) { return load_f16(data); }
  static TRUESHARD_INLINE void store(Element* data, Floats x) { store_f16(data, x); }
};

template <class Type>
TRUESHARD_INLINE Floats load_part(const typename Type::Element* data, int64_t count) {
  alignas(64) typename Type::Element part[kRow] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = data[i];
  return Type::load(part);
}
template <class Type>
TRUESHARD_INLINE void store_part(typename Type::Element* data, int64_t count, Floats x) {
  alignas(64) typename Type::Element part[kRow];
  Type::store(part, x);
  for (int64_t i = 0; i < count; ++i) data[i] = part[i];
}

// out[i] = function(in[i]) row by row; the short last row is filled up with zeros.
template <class In, class Out, class Function>
TRUESHARD_INLINE void map_rows(const void* in, void* out, int64_t count, Function function) {
  const auto* source = static_cast<const typename In::Element*>(in);
  auto* target = static_cast<typename Out::Element*>(out);
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) Out::store(target + i, function(In::load(source + i)));
  if (i < count) store_part<Out>(target + i, count - i, function(load_part<In>(source + i, count - i)));
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
