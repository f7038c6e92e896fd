// SPDX-License-Identifier: BSD-3-Clause
// Role: from tensors of any strides to dense memory and back, and the checks on a call's tensors.
// Invariants: I1 elements between the strides are never written. I2 nothing here records autograd history or bumps
// versions. Threads: pure functions. Errors: the checks return the reason as text, empty when all is well.
#pragma once
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "plugin/comm/conduit.h"

namespace trueshard::comm {

class DenseTensor {  // dense memory with the tensor's elements; store() writes them back where it is a copy
 public:
  static DenseTensor to_read(const at::Tensor& tensor);
  static DenseTensor to_write(const at::Tensor& tensor);
  static DenseTensor to_read_and_write(const at::Tensor& tensor);
  std::byte* data() const { return static_cast<std::byte*>(dense_.data_ptr()); }
  void store() const;

 private:
  DenseTensor(at::Tensor target, at::Tensor dense) : target_(std::move(target)), dense_(std::move(dense)) {}
  at::Tensor target_, dense_;
};

// Why this tensor cannot be read, or written, by a collective.
std::string refuse_input(const at::Tensor& tensor);
std::string refuse_output(const at::Tensor& tensor);
// Why these tensors are not all of one dtype and of so many elements.
std::string refuse_unlike(const std::vector<at::Tensor>& tensors, c10::ScalarType dtype, int64_t elements,
                          const char* what);
// Why this rank cannot be the root of a call in a group of `size` ranks.
std::string refuse_root(int64_t root, int size);
// A digest of dtypes and sizes, for the fingerprint of a list.
uint64_t digest_of(const std::vector<at::Tensor>& tensors);
// A complex tensor seen as real pairs where the reduction allows it.
at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op);
// The specification of a reduction; the factor's bits and the kind enter the fingerprint.
ReductionSpec reduction_spec(const c10d::ReduceOp& op, c10::ScalarType dtype, Fingerprint* fingerprint);
inline uint32_t dtype_code(c10::ScalarType dtype) { return static_cast<uint32_t>(dtype) + 1; }

}  // namespace trueshard::comm
