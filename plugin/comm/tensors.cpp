// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/tensors.h"

#include <bit>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "plugin/comm/names.h"

namespace trueshard::comm {
namespace {

at::Tensor plain(const at::Tensor& tensor) {  // no lazy conjugation or negation: bytes are what they say
  return tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
}

std::string size_text(const at::Tensor& tensor) {
  std::string text = "(";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d > 0 ? ", " : "") + std::to_string(tensor.size(d));
  return text + ")";
}

}  // namespace

DenseTensor DenseTensor::to_read(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return {at::Tensor(), plain(tensor).contiguous()};
}

DenseTensor DenseTensor::to_write(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const bool direct = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  return {tensor, direct ? tensor : at::empty(tensor.sizes(), tensor.options())};
}

DenseTensor DenseTensor::to_read_and_write(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return {tensor, plain(tensor).contiguous()};
}

void DenseTensor::store() const {
  if (!target_.defined() || dense_.is_same(target_) || target_.numel() == 0) return;
  if (target_.is_contiguous() && dense_.data_ptr() == target_.data_ptr() && !target_.is_conj() && !target_.is_neg())
    return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  target_.copy_(dense_);
}

std::string refuse_input(const at::Tensor& tensor) {
  if (!tensor.defined()) return "a tensor is undefined";
  if (tensor.layout() != at::kStrided)
    return "a tensor has layout " + c10::str(tensor.layout()) + ", expected a dense (strided) one";
  if (tensor.is_quantized()) return "a tensor is quantized, expected a plain one";
  if (!tensor.device().is_cpu()) return "a tensor is on " + tensor.device().str() + ", expected cpu";
  return {};
}

std::string refuse_output(const at::Tensor& tensor) {
  std::string text = refuse_input(tensor);
  if (!text.empty()) return text;
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "an output tensor of size " + size_text(tensor) +
           " is expanded: several of its elements share memory; pass a clone()";
  }
  return {};
}

std::string refuse_unlike(const std::vector<at::Tensor>& tensors, c10::ScalarType dtype, int64_t elements,
                          const char* what) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() == dtype && tensors[i].numel() == elements) continue;
    return std::string(what) + " " + std::to_string(i) + " is " + dtype_name(tensors[i].scalar_type()) + " of size " +
           size_text(tensors[i]) + ", expected " + dtype_name(dtype) + " with " + std::to_string(elements) +
           " elements";
  }
  return {};
}

std::string refuse_root(int64_t root, int size) {
  if (root >= 0 && root < size) return {};
  return "root is rank " + std::to_string(root) + ", expected 0 to " + std::to_string(size - 1);
}

uint64_t digest_of(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a over 64-bit words
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3ULL; };
  add(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    add(dtype_code(tensor.scalar_type()));
    add(static_cast<uint64_t>(tensor.numel()));
  }
  return hash;
}

at::Tensor as_real(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!tensor.defined() || !tensor.is_complex() || !c10d::isComplexViewAsRealAllowed(op)) return tensor;
  const at::AutoDispatchBelowADInplaceOrView guard;
  return at::view_as_real(plain(tensor));
}

ReductionSpec reduction_spec(const c10d::ReduceOp& op, c10::ScalarType dtype, Fingerprint* fingerprint) {
  ReductionSpec spec;
  spec.reduction = static_cast<Reduction>(op.op_);
  spec.dtype = dtype;
  fingerprint->reduction = static_cast<uint32_t>(op.op_) + 1;
  fingerprint->dtype = dtype_code(dtype);
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return spec;
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    spec.factor = std::numeric_limits<double>::quiet_NaN();  // refused by the caller
    return spec;
  }
  spec.factor =
      supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
  fingerprint->detail ^= std::bit_cast<uint64_t>(spec.factor);
  return spec;
}

}  // namespace trueshard::comm
