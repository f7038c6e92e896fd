// SPDX-License-Identifier: BSD-3-Clause
// Role: operands for the kernel tests: awkward numbers in memory whose neighbours cannot be touched.
// Invariants: an Array ends (or begins) at a page that may not be read: one element too far ends the test program.
// Shapes: dense arrays of `count` elements of a kernels::DType. Threads: none.
// Errors: std::runtime_error when mmap fails.
#pragma once
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace trueshard::kernels::test {

const std::vector<int64_t>& ragged_counts();
std::string dtype_name(DType dtype);
// All tables but the reference.
std::vector<Isa> fast_isas();

enum class Edge { kEnd, kBegin };

class Array {
 public:
  Array(DType dtype, int64_t count, Edge edge = Edge::kEnd);
  Array(const Array& other);
  Array(Array&& other) noexcept;
  Array& operator=(const Array&) = delete;
  ~Array();

  DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  uint64_t bits(int64_t index) const;
  void set_bits(int64_t index, uint64_t value);
  double value(int64_t index) const;  // exact; by the reference table

 private:
  DType dtype_;
  int64_t count_;
  Edge edge_;
  void* pages_ = nullptr;
  size_t mapped_ = 0;
  void* data_ = nullptr;
};

// Ordinary numbers, random bit patterns, denormals, zeros of both signs, infinities, quiet and signalling NaN.
enum class Numbers { kAll, kFinite };
Array awkward_array(DType dtype, int64_t count, Numbers numbers, unsigned seed);

bool is_nan_bits(uint64_t bits, DType dtype);
// Same bits, or NaN on both sides (payloads are not promised); stops at the first difference.
void expect_same_numbers(const Array& got, const Array& expected, const std::string& what);
void expect_same_bits(const Array& got, const Array& expected, const std::string& what);

}  // namespace trueshard::kernels::test
