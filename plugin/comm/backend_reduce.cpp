// SPDX-License-Identifier: BSD-3-Clause
#include <initializer_list>
#include <string>

#include <ATen/core/Tensor.h>

#include "plugin/comm/backend_class.h"
#include "plugin/comm/sparse_reduce.h"
#include "plugin/comm/tensors.h"

namespace trueshard::comm {
namespace {

int64_t elements_of(const Tensors& tensors) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.defined() ? tensor.numel() : 0;
  return elements;
}

Tensors all_as_real(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors real;
  for (const at::Tensor& tensor : tensors) real.push_back(as_real(tensor, op));
  return real;
}

std::string refuse_reduction(const c10d::ReduceOp& op, const Tensors& tensors) {
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM && !op.supplement_)
    return "premul_sum has no factor; make it with makePreMulSum()";
  for (const at::Tensor& tensor : tensors) {
    Fingerprint ignored;
    std::string text = reduction_refusal(reduction_spec(op, tensor.scalar_type(), &ignored));
    if (!text.empty()) return text;
  }
  return {};
}

std::string first_of(std::initializer_list<std::string> texts) {
  for (const std::string& text : texts) {
    if (!text.empty()) return text;
  }
  return {};
}

template <class Check>
std::string refuse_any(const Tensors& tensors, const Check& check) {
  if (tensors.empty()) return "no tensors were given";
  for (const at::Tensor& tensor : tensors) {
    std::string text = check(tensor);
    if (!text.empty()) return text;
  }
  return {};
}

// Fills in the fingerprint of a list of tensors to be reduced, and the refusal where the reduction is impossible.
void describe(const char* name, const Tensors& tensors, const c10d::ReduceOp& op, CollectiveCall* call,
              std::string* refusal) {
  call->fingerprint = Fingerprint::of(name);
  if (refusal->empty()) *refusal = refuse_reduction(op, tensors);
  if (!refusal->empty()) return;
  call->spec = reduction_spec(op, tensors.front().scalar_type(), &call->fingerprint);
  call->fingerprint.elements = elements_of(tensors);
  if (tensors.size() > 1) call->fingerprint.detail ^= digest_of(tensors);
}

// The call for one tensor of a list.
CollectiveCall call_for(const CollectiveCall& call, const at::Tensor& tensor) {
  CollectiveCall one = call;
  one.spec.dtype = tensor.scalar_type();
  return one;
}

}  // namespace

WorkPtr Backend::start_all_reduce(Request request, const Tensors& given, const c10d::ReduceOp& op) {
  const Tensors tensors = all_as_real(given, op);
  request.inputs = given;
  request.outputs = given;
  request.refusal = refuse_any(tensors, refuse_output);
  describe(request.name, tensors, op, &request.call, &request.refusal);
  request.run = [tensors](Conduit& conduit, const CollectiveCall& call) {
    for (const at::Tensor& tensor : tensors) {
      const DenseTensor dense = DenseTensor::to_read_and_write(tensor);
      conduit.all_reduce(call_for(call, tensor), dense.data(), tensor.numel());
      dense.store();
    }
  };
  return start(std::move(request));
}

WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Request request{c10d::OpType::_ALLREDUCE_SPARSE, "allreduce", options.timeout, options.asyncOp};
  request.inputs = tensors;
  request.outputs = tensors;
  request.refusal =
      first_of({tensors.size() == 1 ? std::string() : std::to_string(tensors.size()) + " sparse tensors, expected 1",
                refuse_any(tensors, refuse_sparse)});
  describe("allreduce", tensors, options.reduceOp, &request.call, &request.refusal);
  if (request.refusal.empty()) request.call.fingerprint.detail ^= sparse_digest(tensors[0]);
  request.run = [tensors](Conduit& conduit, const CollectiveCall& call) {
    all_reduce_sparse(conduit, call, tensors[0]);
  };
  return start(std::move(request));
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == c10::kSparse)
    return allreduce_sparse(tensors, options);
  return start_all_reduce({c10d::OpType::ALLREDUCE, "allreduce", options.timeout, options.asyncOp}, tensors,
                          options.reduceOp);
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return start_all_reduce({c10d::OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", options.timeout, options.asyncOp},
                          tensors, options.reduceOp);
}

WorkPtr Backend::reduce(Tensors& given, const c10d::ReduceOptions& options) {
  const Tensors tensors = all_as_real(given, options.reduceOp);
  Request request{c10d::OpType::REDUCE, "reduce", options.timeout, options.asyncOp};
  request.inputs = given;
  request.outputs = given;
  request.refusal = first_of({refuse_root(options.rootRank, size_), refuse_any(tensors, refuse_output)});
  describe("reduce", tensors, options.reduceOp, &request.call, &request.refusal);
  request.call.fingerprint.root = static_cast<int32_t>(options.rootRank);
  const bool root = options.rootRank == rank_;
  request.run = [tensors, root](Conduit& conduit, const CollectiveCall& call) {
    for (const at::Tensor& tensor : tensors) {
      const DenseTensor dense = DenseTensor::to_read_and_write(tensor);
      conduit.reduce(call_for(call, tensor), dense.data(), tensor.numel());
      if (root) dense.store();
    }
  };
  return start(std::move(request));
}

WorkPtr Backend::start_reduce_scatter(Request request, const std::vector<Tensors>& given_inputs,
                                      const Tensors& given_outputs, const c10d::ReduceOp& op) {
  const Tensors outputs = all_as_real(given_outputs, op);
  std::vector<Tensors> inputs;
  for (const Tensors& list : given_inputs) inputs.push_back(all_as_real(list, op));
  request.outputs = given_outputs;
  request.refusal = refuse_any(outputs, refuse_output);
  if (request.refusal.empty() && inputs.size() != outputs.size()) {
    request.refusal =
        std::to_string(inputs.size()) + " lists of inputs for " + std::to_string(outputs.size()) + " outputs";
  }
  for (size_t i = 0; i < outputs.size() && request.refusal.empty(); ++i) {
    request.inputs.insert(request.inputs.end(), given_inputs[i].begin(), given_inputs[i].end());
    // One tensor for all ranks together, or one per rank.
    const bool whole = request.type != c10d::OpType::REDUCE_SCATTER;
    const size_t expected = whole ? 1 : static_cast<size_t>(size_);
    request.refusal = refuse_any(inputs[i], refuse_input);
    if (request.refusal.empty() && inputs[i].size() != expected) {
      request.refusal =
          std::to_string(inputs[i].size()) + " inputs, expected one per rank (" + std::to_string(expected) + ")";
    }
    if (request.refusal.empty()) {
      request.refusal =
          refuse_unlike(inputs[i], outputs[i].scalar_type(), outputs[i].numel() * (whole ? size_ : 1), "input");
    }
  }
  describe(request.name, outputs, op, &request.call, &request.refusal);
  request.run = [inputs, outputs](Conduit& conduit, const CollectiveCall& call) {
    const auto ranks = static_cast<size_t>(conduit.transport().size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      std::vector<DenseTensor> kept;
      std::vector<const std::byte*> pieces;
      for (const at::Tensor& tensor : inputs[i]) kept.push_back(DenseTensor::to_read(tensor));
      const auto piece_bytes = static_cast<size_t>(outputs[i].numel()) * outputs[i].element_size();
      for (size_t r = 0; r < ranks; ++r) {
        pieces.push_back(kept.size() == ranks ? kept[r].data() : kept[0].data() + r * piece_bytes);
      }
      const DenseTensor dense = DenseTensor::to_write(outputs[i]);
      conduit.reduce_scatter(call_for(call, outputs[i]), pieces, dense.data(), outputs[i].numel());
      dense.store();
    }
  };
  return start(std::move(request));
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& options) {
  return start_reduce_scatter({c10d::OpType::REDUCE_SCATTER, "reduce_scatter", options.timeout, options.asyncOp},
                              inputs, outputs, options.reduceOp);
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& options) {
  return start_reduce_scatter(
      {c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", options.timeout, options.asyncOp}, {{input}},
      {output}, options.reduceOp);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  std::vector<Tensors> lists;
  for (const at::Tensor& input : inputs) lists.push_back({input});
  return start_reduce_scatter({c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, "reduce_scatter_tensor_coalesced",
                               options.timeout, options.asyncOp},
                              lists, outputs, options.reduceOp);
}

}  // namespace trueshard::comm
