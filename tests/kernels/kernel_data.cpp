// SPDX-License-Identifier: BSD-3-Clause
#include "tests/kernels/kernel_data.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace trueshard::kernels::test {

const std::vector<int64_t>& ragged_counts() {
  static const std::vector<int64_t> counts = {0, 1, 15, 16, 17, 255, 256, 257, 1000, 4099};
  return counts;
}

std::string dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

std::vector<Isa> fast_isas() {
  std::vector<Isa> isas = available_isas();
  isas.erase(isas.begin());
  return isas;
}

Array::Array(DType dtype, int64_t count, Edge edge) : dtype_(dtype), count_(count), edge_(edge) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto bytes = static_cast<size_t>(count * itemsize(dtype));
  const size_t whole = (bytes + page - 1) / page * page + page;
  mapped_ = whole + 2 * page;
  pages_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages_ == MAP_FAILED) throw std::runtime_error("mmap of " + std::to_string(mapped_) + " bytes failed");
  char* first = static_cast<char*>(pages_) + page;
  if (mprotect(first, whole, PROT_READ | PROT_WRITE) != 0) throw std::runtime_error("mprotect failed");
  data_ = edge == Edge::kEnd ? first + whole - bytes : first;
}

Array::Array(const Array& other) : Array(other.dtype_, other.count_, other.edge_) {
  if (count_ > 0) std::memcpy(data_, other.data_, static_cast<size_t>(count_ * itemsize(dtype_)));
}

Array::Array(Array&& other) noexcept
    : dtype_(other.dtype_),
      count_(other.count_),
      edge_(other.edge_),
      pages_(other.pages_),
      mapped_(other.mapped_),
      data_(other.data_) {
  other.pages_ = nullptr;
}

Array::~Array() {
  if (pages_ != nullptr) munmap(pages_, mapped_);
}

uint64_t Array::bits(int64_t index) const {
  uint64_t bits = 0;
  const auto size = static_cast<size_t>(itemsize(dtype_));
  std::memcpy(&bits, static_cast<const char*>(data_) + static_cast<size_t>(index) * size, size);
  return bits;
}

void Array::set_bits(int64_t index, uint64_t value) {
  const auto size = static_cast<size_t>(itemsize(dtype_));
  std::memcpy(static_cast<char*>(data_) + static_cast<size_t>(index) * size, &value, size);
}

double Array::value(int64_t index) const {
  const uint64_t element = bits(index);
  double value = 0;
  if (dtype_ == DType::kFloat64) {
    std::memcpy(&value, &element, sizeof(value));
  } else {
    kernels(Isa::kReference).cast(&element, dtype_, &value, DType::kFloat64, 1);
  }
  return value;
}

namespace {

struct Layout {
  int bits, mantissa;
};
Layout layout_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {32, 23};
    case DType::kBFloat16:
      return {16, 7};
    case DType::kFloat16:
      return {16, 10};
    case DType::kFloat64:
      break;
  }
  return {64, 52};
}

uint64_t infinity_of(Layout layout) {
  return ((uint64_t{1} << (layout.bits - 1 - layout.mantissa)) - 1) << layout.mantissa;
}

uint64_t special_bits(Layout layout, uint64_t pick) {
  const uint64_t infinity = infinity_of(layout);
  const uint64_t quiet = infinity | (uint64_t{1} << (layout.mantissa - 1));
  switch (pick % 4) {
    case 0:
      return infinity;
    case 1:
      return quiet;
    case 2:
      return infinity | 1;  // signalling NaN
    default:
      return quiet | 1;
  }
}

uint64_t awkward_bits(Layout layout, Numbers numbers, std::mt19937_64& random) {
  const uint64_t mantissa_mask = (uint64_t{1} << layout.mantissa) - 1;
  const uint64_t sign = (random() & 1) << (layout.bits - 1);
  const uint64_t kind = random() % 100, any = random();
  const uint64_t infinity = infinity_of(layout);
  if (kind < 60) {  // magnitudes around 1, so that sums round
    const uint64_t one = infinity / 2 & ~mantissa_mask;
    return sign | (one - ((any >> 60) << layout.mantissa) % one + (any & mantissa_mask));
  }
  if (kind < 70) return sign | (any & mantissa_mask);  // denormal
  if (kind < 75) return sign;                          // zeros
  if (kind < 78 && numbers == Numbers::kAll) return sign | special_bits(layout, any);
  const uint64_t bits = any & (infinity | mantissa_mask);
  return sign | (numbers == Numbers::kAll || bits < infinity ? bits : bits & mantissa_mask);
}

}  // namespace

Array awkward_array(DType dtype, int64_t count, Numbers numbers, unsigned seed) {
  Array array(dtype, count, seed % 2 == 0 ? Edge::kEnd : Edge::kBegin);
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < count; ++i) array.set_bits(i, awkward_bits(layout_of(dtype), numbers, random));
  return array;
}

bool is_nan_bits(uint64_t bits, DType dtype) {
  const Layout layout = layout_of(dtype);
  return (bits & ((uint64_t{1} << (layout.bits - 1)) - 1)) > infinity_of(layout);
}

void expect_same_numbers(const Array& got, const Array& expected, const std::string& what) {
  ASSERT_EQ(got.count(), expected.count()) << what;
  for (int64_t i = 0; i < got.count(); ++i) {
    const uint64_t a = got.bits(i), b = expected.bits(i);
    if (a == b || (is_nan_bits(a, got.dtype()) && is_nan_bits(b, expected.dtype()))) continue;
    FAIL() << what << ": element " << i << " of " << got.count() << " is " << std::hex << a << ", expected " << b;
  }
}

void expect_same_bits(const Array& got, const Array& expected, const std::string& what) {
  ASSERT_EQ(got.count(), expected.count()) << what;
  for (int64_t i = 0; i < got.count(); ++i) {
    if (got.bits(i) == expected.bits(i)) continue;
    FAIL() << what << ": element " << i << " of " << got.count() << " is " << std::hex << got.bits(i) << ", expected "
           << expected.bits(i);
  }
}

}  // namespace trueshard::kernels::test
