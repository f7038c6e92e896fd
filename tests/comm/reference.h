// SPDX-License-Identifier: BSD-3-Clause
// Role: what the tests of the backend compare with: leaves of each rank, the serial tree over them, and short ways to
// call. Invariants: the tree is docs/numerics.md section 1, literally. Threads: pure functions. Errors: none.
#pragma once
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tests/support/ranks.h"

namespace trueshard::comm {

using c10d::ReduceOp;
using testing::Group;
using ::testing::HasSubstr;
using testing::RankResults;

// Leaf of one rank: values that round, of both signs, with few exact ties.
inline at::Tensor leaf(int rank, int64_t elements, at::ScalarType dtype, uint64_t seed = 1) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(rank));
  at::Tensor values = at::empty({elements}, at::kDouble);
  std::uniform_real_distribution<double> uniform(-100, 100);
  double* data = values.data_ptr<double>();
  for (int64_t i = 0; i < elements; ++i) data[i] = uniform(random);
  if (dtype == at::kBool) return values > 0;
  return values.to(dtype);
}

// docs/numerics.md section 1, literally.
inline at::Tensor tree(const std::vector<at::Tensor>& leaves, size_t low, size_t high, bool product) {
  const size_t count = high - low;
  if (count == 1) return leaves[low];
  size_t split = 1;
  while (split * 2 < count) split *= 2;
  const at::Tensor left = tree(leaves, low, low + split, product), right = tree(leaves, low + split, high, product);
  return product ? left * right : left + right;
}

inline at::Tensor reference(const std::vector<at::Tensor>& leaves, ReduceOp::RedOpType op, double factor = 1) {
  const at::ScalarType dtype = leaves[0].scalar_type();
  const bool floating = at::isFloatingType(dtype);
  const at::ScalarType wide = !floating ? dtype : dtype == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> values;
  for (const at::Tensor& l : leaves) values.push_back(l.to(wide));
  at::Tensor result = values[0];
  if (op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM || op == ReduceOp::PRODUCT) {
    if (dtype == at::kBool) {
      for (const at::Tensor& v : values)
        result = op == ReduceOp::PRODUCT ? result.logical_and(v) : result.logical_or(v);
      return result;
    }
    result = tree(values, 0, values.size(), op == ReduceOp::PRODUCT);
    if (op == ReduceOp::AVG) result = result / at::full({}, static_cast<double>(leaves.size()), wide);
    if (op == ReduceOp::PREMUL_SUM) result = result * at::full({}, factor, wide);
    return result.to(dtype);
  }
  for (size_t i = 1; i < values.size(); ++i) {
    const at::Tensor& v = values[i];
    if (op == ReduceOp::MIN) result = at::minimum(result, v);
    if (op == ReduceOp::MAX) result = at::maximum(result, v);
    if (op == ReduceOp::BAND) result = result.bitwise_and(v);
    if (op == ReduceOp::BOR) result = result.bitwise_or(v);
    if (op == ReduceOp::BXOR) result = result.bitwise_xor(v);
  }
  return result.to(dtype);
}

inline std::vector<at::Tensor> leaves_of(int world, int64_t elements, at::ScalarType dtype, uint64_t seed = 1) {
  std::vector<at::Tensor> leaves;
  for (int r = 0; r < world; ++r) leaves.push_back(leaf(r, elements, dtype, seed));
  return leaves;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

inline c10d::AllreduceOptions all_reduce_options(const ReduceOp& op, bool async = true) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = async;
  return options;
}

inline void all_reduce(const Group& group, at::Tensor tensor, const ReduceOp& op = ReduceOp::SUM, bool async = false) {
  std::vector<at::Tensor> list{tensor};
  group->allreduce(list, all_reduce_options(op, async))->wait();
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return testing::detail::text_of(error);
  }
  return "no error";
}

}  // namespace trueshard::comm
