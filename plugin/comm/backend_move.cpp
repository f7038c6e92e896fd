// SPDX-License-Identifier: BSD-3-Clause
#include <numeric>
#include <string>

#include <ATen/core/Tensor.h>

#include "plugin/comm/backend_class.h"
#include "plugin/comm/names.h"
#include "plugin/comm/tensors.h"

namespace trueshard::comm {
namespace {

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

std::string refuse_lists(const Tensors& inputs, const Tensors& outputs) {
  for (const at::Tensor& tensor : inputs) {
    std::string text = refuse_input(tensor);
    if (!text.empty()) return text;
  }
  for (const at::Tensor& tensor : outputs) {
    std::string text = refuse_output(tensor);
    if (!text.empty()) return text;
  }
  return {};
}

std::string refuse_count(size_t got, int64_t expected, const char* what) {
  if (static_cast<int64_t>(got) == expected) return {};
  return std::to_string(got) + " " + what + ", expected " + std::to_string(expected);
}

void describe(const char* name, const Tensors& tensors, CollectiveCall* call) {
  call->fingerprint = Fingerprint::of(name);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    call->fingerprint.dtype = dtype_code(tensors.front().scalar_type());
    call->fingerprint.elements += tensor.numel();
  }
  if (tensors.size() > 1) call->fingerprint.detail = digest_of(tensors);
}

// A tensor whose memory is one piece per rank, or one tensor per rank: both as pointers.
class OutputPieces {
 public:
  OutputPieces(const Tensors& tensors, int ranks) {
    for (const at::Tensor& tensor : tensors) dense_.push_back(DenseTensor::to_write(tensor));
    const bool whole = tensors.size() == 1;
    const int64_t bytes = bytes_of(tensors.front()) / (whole ? ranks : 1);
    for (int r = 0; r < ranks; ++r) {
      pointers.push_back(whole ? dense_[0].data() + r * bytes : dense_[static_cast<size_t>(r)].data());
    }
  }
  void store() const {
    for (const DenseTensor& tensor : dense_) tensor.store();
  }
  std::vector<std::byte*> pointers;

 private:
  std::vector<DenseTensor> dense_;
};

struct Splits {
  std::vector<int64_t> bytes, offsets;
  std::string refusal;
};
Splits splits_of(const at::Tensor& tensor, const std::vector<int64_t>& given, int ranks, const char* what) {
  Splits splits;
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> counts = given;
  if (counts.empty()) {
    if (rows % ranks != 0) {
      splits.refusal = std::string(what) + " has " + std::to_string(rows) + " rows, not a multiple of " +
                       std::to_string(ranks) + " ranks; give the split sizes";
      return splits;
    }
    counts.assign(static_cast<size_t>(ranks), rows / ranks);
  }
  bool negative = false;
  for (const int64_t count : counts) negative = negative || count < 0;
  if (negative || static_cast<int64_t>(counts.size()) != ranks ||
      std::accumulate(counts.begin(), counts.end(), int64_t{0}) != rows) {
    splits.refusal = "the split sizes of the " + std::string(what) + " must be " + std::to_string(ranks) +
                     " numbers that add up to its " + std::to_string(rows) + " rows";
    return splits;
  }
  const int64_t row_bytes = rows == 0 ? 0 : bytes_of(tensor) / rows;
  int64_t offset = 0;
  for (const int64_t count : counts) {
    splits.bytes.push_back(count * row_bytes);
    splits.offsets.push_back(offset);
    offset += count * row_bytes;
  }
  return splits;
}

}  // namespace

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Request request{c10d::OpType::BROADCAST, "broadcast", options.timeout, options.asyncOp};
  request.inputs = tensors;
  request.outputs = tensors;
  request.refusal = refuse_root(options.rootRank, size_);
  if (request.refusal.empty() && tensors.empty()) request.refusal = "no tensors were given";
  const bool root = options.rootRank == rank_;
  if (request.refusal.empty()) request.refusal = root ? refuse_lists(tensors, {}) : refuse_lists({}, tensors);
  describe("broadcast", tensors, &request.call);
  request.call.fingerprint.root = static_cast<int32_t>(options.rootRank);
  request.run = [tensors, root](Conduit& conduit, const CollectiveCall& call) {
    for (const at::Tensor& tensor : tensors) {
      const DenseTensor dense = root ? DenseTensor::to_read(tensor) : DenseTensor::to_write(tensor);
      conduit.broadcast(call, dense.data(), bytes_of(tensor));
      dense.store();
    }
  };
  return start(std::move(request));
}

// outputs[i]: one tensor for all ranks together, or one per rank, for inputs[i].
WorkPtr Backend::start_all_gather(Request request, const Tensors& inputs, const std::vector<Tensors>& outputs) {
  request.inputs = inputs;
  for (const Tensors& list : outputs) request.outputs.insert(request.outputs.end(), list.begin(), list.end());
  request.refusal = refuse_lists(inputs, request.outputs);
  if (request.refusal.empty() && inputs.empty()) request.refusal = "no tensors were given";
  if (request.refusal.empty())
    request.refusal = refuse_count(outputs.size(), static_cast<int64_t>(inputs.size()), "output lists");
  const bool whole = request.type == c10d::OpType::_ALLGATHER_BASE || request.type == c10d::OpType::COALESCED;
  for (size_t i = 0; i < inputs.size() && request.refusal.empty(); ++i) {
    request.refusal = refuse_count(outputs[i].size(), whole ? 1 : size_, "outputs");
    if (!request.refusal.empty()) break;
    request.refusal =
        refuse_unlike(outputs[i], inputs[i].scalar_type(), inputs[i].numel() * (whole ? size_ : 1), "output");
  }
  describe(request.name, inputs, &request.call);
  request.run = [inputs, outputs](Conduit& conduit, const CollectiveCall& call) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const DenseTensor input = DenseTensor::to_read(inputs[i]);
      const OutputPieces pieces(outputs[i], conduit.transport().size());
      conduit.all_gather(call, input.data(), pieces.pointers, bytes_of(inputs[i]));
      pieces.store();
    }
  };
  return start(std::move(request));
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return start_all_gather({c10d::OpType::ALLGATHER, "allgather", options.timeout, options.asyncOp}, inputs, outputs);
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return start_all_gather({c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", options.timeout, options.asyncOp},
                          {input}, {{output}});
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  std::vector<Tensors> lists;
  for (const at::Tensor& output : outputs) lists.push_back({output});
  return start_all_gather(
      {c10d::OpType::COALESCED, "all_gather_into_tensor_coalesced", options.timeout, options.asyncOp}, inputs, lists);
}

// Here outputs[r][i] is rank r's tensor i.
WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  std::vector<Tensors> lists(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& of_rank : outputs) {
      if (i < of_rank.size()) lists[i].push_back(of_rank[i]);
    }
  }
  return start_all_gather({c10d::OpType::ALLGATHER_COALESCED, "allgather_coalesced", options.timeout, options.asyncOp},
                          inputs, lists);
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Request request{c10d::OpType::GATHER, "gather", options.timeout, options.asyncOp};
  const bool root = options.rootRank == rank_;
  const Tensors list = root && !outputs.empty() ? outputs[0] : Tensors{};
  request.inputs = inputs;
  request.outputs = list;
  request.refusal = refuse_root(options.rootRank, size_);
  if (request.refusal.empty()) request.refusal = refuse_count(inputs.size(), 1, "inputs");
  if (request.refusal.empty()) request.refusal = refuse_lists(inputs, list);
  if (request.refusal.empty() && root) request.refusal = refuse_count(list.size(), size_, "outputs");
  if (request.refusal.empty() && root)
    request.refusal = refuse_unlike(list, inputs[0].scalar_type(), inputs[0].numel(), "output");
  describe("gather", inputs, &request.call);
  request.call.fingerprint.root = static_cast<int32_t>(options.rootRank);
  request.run = [inputs, list](Conduit& conduit, const CollectiveCall& call) {
    const DenseTensor input = DenseTensor::to_read(inputs[0]);
    if (list.empty()) return conduit.gather(call, input.data(), {}, bytes_of(inputs[0]));
    std::vector<DenseTensor> dense;
    std::vector<std::byte*> pointers;
    for (const at::Tensor& tensor : list) {
      dense.push_back(DenseTensor::to_write(tensor));
      pointers.push_back(dense.back().data());
    }
    conduit.gather(call, input.data(), pointers, bytes_of(inputs[0]));
    for (const DenseTensor& tensor : dense) tensor.store();
  };
  return start(std::move(request));
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  Request request{c10d::OpType::SCATTER, "scatter", options.timeout, options.asyncOp};
  const bool root = options.rootRank == rank_;
  const Tensors list = root && !inputs.empty() ? inputs[0] : Tensors{};
  request.inputs = list;
  request.outputs = outputs;
  request.refusal = refuse_root(options.rootRank, size_);
  if (request.refusal.empty()) request.refusal = refuse_count(outputs.size(), 1, "outputs");
  if (request.refusal.empty()) request.refusal = refuse_lists(list, outputs);
  if (request.refusal.empty() && root) request.refusal = refuse_count(list.size(), size_, "inputs");
  if (request.refusal.empty() && root)
    request.refusal = refuse_unlike(list, outputs[0].scalar_type(), outputs[0].numel(), "input");
  describe("scatter", outputs, &request.call);
  request.call.fingerprint.root = static_cast<int32_t>(options.rootRank);
  request.run = [list, outputs](Conduit& conduit, const CollectiveCall& call) {
    std::vector<DenseTensor> dense;
    std::vector<const std::byte*> pointers;
    for (const at::Tensor& tensor : list) {
      dense.push_back(DenseTensor::to_read(tensor));
      pointers.push_back(dense.back().data());
    }
    const DenseTensor output = DenseTensor::to_write(outputs[0]);
    conduit.scatter(call, pointers, output.data(), bytes_of(outputs[0]));
    output.store();
  };
  return start(std::move(request));
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  Request request{c10d::OpType::ALLTOALL_BASE, "all_to_all_single", options.timeout, options.asyncOp};
  request.inputs = {input};
  request.outputs = {output};
  request.refusal = refuse_lists({input}, {output});
  Splits from, to;
  if (request.refusal.empty()) {
    from = splits_of(input, input_splits, size_, "input");
    to = splits_of(output, output_splits, size_, "output");
    request.refusal = !from.refusal.empty() ? from.refusal : to.refusal;
  }
  if (request.refusal.empty() && input.scalar_type() != output.scalar_type()) {
    request.refusal =
        "the input is " + dtype_name(input.scalar_type()) + " and the output " + dtype_name(output.scalar_type());
  }
  request.call.fingerprint = Fingerprint::of("all_to_all_single");
  if (request.refusal.empty()) request.call.fingerprint.dtype = dtype_code(input.scalar_type());
  request.run = [input, output, from, to](Conduit& conduit, const CollectiveCall& call) {
    const DenseTensor source = DenseTensor::to_read(input), target = DenseTensor::to_write(output);
    Conduit::Pieces pieces{{}, from.bytes, {}, to.bytes};
    for (const int64_t offset : from.offsets) pieces.inputs.push_back(source.data() + offset);
    for (const int64_t offset : to.offsets) pieces.outputs.push_back(target.data() + offset);
    conduit.all_to_all(call, pieces);
    target.store();
  };
  return start(std::move(request));
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Request request{c10d::OpType::ALLTOALL, "all_to_all", options.timeout, options.asyncOp};
  request.inputs = inputs;
  request.outputs = outputs;
  request.refusal = refuse_lists(inputs, outputs);
  if (request.refusal.empty()) request.refusal = refuse_count(inputs.size(), size_, "inputs");
  if (request.refusal.empty()) request.refusal = refuse_count(outputs.size(), size_, "outputs");
  for (const Tensors* list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (!request.refusal.empty() || tensor.scalar_type() == inputs[0].scalar_type()) continue;
      request.refusal = "the tensors are not all " + dtype_name(inputs[0].scalar_type());
    }
  }
  request.call.fingerprint = Fingerprint::of("all_to_all");
  if (request.refusal.empty()) request.call.fingerprint.dtype = dtype_code(inputs[0].scalar_type());
  request.run = [inputs, outputs](Conduit& conduit, const CollectiveCall& call) {
    std::vector<DenseTensor> sources, targets;
    Conduit::Pieces pieces;
    for (size_t r = 0; r < inputs.size(); ++r) {
      sources.push_back(DenseTensor::to_read(inputs[r]));
      targets.push_back(DenseTensor::to_write(outputs[r]));
      pieces.inputs.push_back(sources.back().data());
      pieces.outputs.push_back(targets.back().data());
      pieces.input_bytes.push_back(bytes_of(inputs[r]));
      pieces.output_bytes.push_back(bytes_of(outputs[r]));
    }
    conduit.all_to_all(call, pieces);
    for (const DenseTensor& target : targets) target.store();
  };
  return start(std::move(request));
}

}  // namespace trueshard::comm
