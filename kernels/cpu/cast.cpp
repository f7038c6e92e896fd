// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/round_to_odd.h"
#include "kernels/cpu/rows.h"

namespace trueshard::kernels::TRUESHARD_CPU_ISA {
namespace {

struct Unchanged {
  TRUESHARD_INLINE Floats operator()(Floats x) const { return x; }
};

template <class In>
void cast_from(const void* in, void* out, DType out_dtype, int64_t count) {
  switch (out_dtype) {
    case DType::kFloat32:
      return map_rows<In, Float32>(in, out, count, Unchanged());
    case DType::kBFloat16:
      return map_rows<In, BFloat16>(in, out, count, Unchanged());
    case DType::kFloat16:
      return map_rows<In, Float16>(in, out, count, Unchanged());
    case DType::kFloat64:
      break;
  }
  const auto* source = static_cast<const typename In::Element*>(in);
  auto* target = static_cast<double*>(out);
  for (int64_t i = 0; i < count; i += kRow) {
    alignas(64) float row[kRow];
    const int64_t part = count - i < kRow ? count - i : kRow;
    store_f32(row, part == kRow ? In::load(source + i) : load_part<In>(source + i, part));
    for (int64_t k = 0; k < part; ++k) target[i + k] = row[k];
  }
}

template <class Out>
void cast_from_f64(const double* in, typename Out::Element* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kRow) {
    alignas(64) float row[kRow] = {};
    const int64_t part = count - i < kRow ? count - i : kRow;
    for (int64_t k = 0; k < part; ++k) row[k] = round_to_odd(in[i + k]);
    if (part == kRow) {
      Out::store(out + i, load_f32(row));
    } else {
      store_part<Out>(out + i, part, load_f32(row));
    }
  }
}

void cast_from_f64(const void* in, void* out, DType out_dtype, int64_t count) {
  const auto* source = static_cast<const double*>(in);
  switch (out_dtype) {
    case DType::kBFloat16:
      return cast_from_f64<BFloat16>(source, static_cast<uint16_t*>(out), count);
    case DType::kFloat16:
      return cast_from_f64<Float16>(source, static_cast<uint16_t*>(out), count);
    case DType::kFloat32:
    case DType::kFloat64:
      break;
  }
  auto* target = static_cast<float*>(out);
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(source[i]);
}

}  // namespace

void cast(const void* in, DType in_dtype, void* out, DType out_dtype, int64_t count) {
  if (in_dtype == out_dtype) {
    const int64_t size = in_dtype == DType::kFloat64 ? 8 : in_dtype == DType::kFloat32 ? 4 : 2;
    if (in != out && count > 0) __builtin_memcpy(out, in, static_cast<size_t>(count * size));
    return;
  }
  switch (in_dtype) {
    case DType::kFloat32:
      return cast_from<Float32>(in, out, out_dtype, count);
    case DType::kBFloat16:
      return cast_from<BFloat16>(in, out, out_dtype, count);
    case DType::kFloat16:
      return cast_from<Float16>(in, out, out_dtype, count);
    case DType::kFloat64:
      return cast_from_f64(in, out, out_dtype, count);
  }
}

}  // namespace trueshard::kernels::TRUESHARD_CPU_ISA
