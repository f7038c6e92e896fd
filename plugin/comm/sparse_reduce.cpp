// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/sparse_reduce.h"

#include <limits>
#include <vector>

#include <ATen/ATen.h>

namespace trueshard::comm {
namespace {

CollectiveCall part_of(const CollectiveCall& call, const char* what, int64_t elements) {
  CollectiveCall part = call;
  const uint64_t detail = call.fingerprint.detail;
  part.fingerprint = Fingerprint::of(what);
  part.fingerprint.dtype = call.fingerprint.dtype;
  part.fingerprint.reduction = call.fingerprint.reduction;
  part.fingerprint.elements = elements;
  part.fingerprint.detail = detail;
  return part;
}

// One row of int64 per rank, gathered; all of the same length.
at::Tensor gather_rows(Conduit& conduit, const CollectiveCall& call, const at::Tensor& row) {
  const int64_t ranks = conduit.transport().size(), bytes = row.numel() * int64_t{8};
  at::Tensor rows = at::empty({ranks, row.numel()}, at::kLong);
  std::vector<std::byte*> outputs;
  for (int64_t r = 0; r < ranks; ++r) outputs.push_back(static_cast<std::byte*>(rows.data_ptr()) + r * bytes);
  conduit.all_gather(call, static_cast<const std::byte*>(row.data_ptr()), outputs, bytes);
  return rows;
}

// Row-major numbers of the sparse coordinates [dims, n].
at::Tensor number_rows(const at::Tensor& indices, at::IntArrayRef sizes) {
  at::Tensor numbers = at::zeros({indices.size(1)}, at::kLong);
  for (int64_t d = 0; d < indices.size(0); ++d) numbers.mul_(sizes[static_cast<size_t>(d)]).add_(indices.select(0, d));
  return numbers;
}

at::Tensor coordinates_of(const at::Tensor& numbers, at::IntArrayRef sizes, int64_t dims) {
  at::Tensor indices = at::empty({dims, numbers.numel()}, at::kLong), rest = numbers.clone();
  for (int64_t d = dims - 1; d >= 0; --d) {
    const int64_t size = sizes[static_cast<size_t>(d)];
    indices.select(0, d).copy_(rest.remainder(size));
    rest = rest.div(size, "floor");
  }
  return indices;
}

}  // namespace

std::string refuse_sparse(const at::Tensor& tensor) {
  if (tensor.layout() != at::kSparse || !tensor.device().is_cpu())
    return "a tensor has layout " + c10::str(tensor.layout()) + " on " + tensor.device().str() +
           ", expected a dense or a sparse COO tensor on cpu";
  int64_t rows = 1;
  for (int64_t d = 0; d < tensor.sparse_dim(); ++d) {
    const int64_t size = std::max<int64_t>(1, tensor.size(d));
    if (rows > std::numeric_limits<int64_t>::max() / size)
      return "a sparse tensor has more places than 63 bits can number; make it smaller or dense";
    rows *= size;
  }
  return {};
}

uint64_t sparse_digest(const at::Tensor& tensor) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&hash](int64_t value) { hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3ULL; };
  add(tensor.sparse_dim());
  for (const int64_t size : tensor.sizes()) add(size);
  return hash;
}

void all_reduce_sparse(Conduit& conduit, const CollectiveCall& call, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach().coalesce();
  const int64_t dims = own.sparse_dim(), ranks = conduit.transport().size();
  const at::Tensor numbers = number_rows(own.indices(), own.sizes());
  const at::Tensor counts =
      gather_rows(conduit, part_of(call, "allreduce sparse count", 1), at::full({1}, numbers.numel(), at::kLong));
  const int64_t most = counts.max().item<int64_t>();

  at::Tensor padded = at::zeros({most}, at::kLong);
  padded.narrow(0, 0, numbers.numel()).copy_(numbers);
  const at::Tensor rows = gather_rows(conduit, part_of(call, "allreduce sparse rows", most), padded);
  std::vector<at::Tensor> present;
  for (int64_t r = 0; r < ranks; ++r)
    present.push_back(rows.select(0, r).narrow(0, 0, counts.select(0, r).item<int64_t>()));
  const at::Tensor all = std::get<0>(at::_unique2(at::cat(present), /*sorted=*/true));

  std::vector<int64_t> shape = own.values().sizes().vec();
  shape[0] = all.numel();
  at::Tensor values = at::zeros(shape, own.values().options());
  if (numbers.numel() > 0) values.index_copy_(0, at::searchsorted(all, numbers), own.values());
  CollectiveCall sum = call;
  sum.fingerprint.elements = values.numel();
  conduit.all_reduce(sum, static_cast<std::byte*>(values.data_ptr()), values.numel());

  at::Tensor result = at::sparse_coo_tensor(coordinates_of(all, own.sizes(), dims), values, own.sizes(), own.options());
  result._coalesced_(true);
  tensor.copy_(result);  // not through detach(): that is another sparse object
}

}  // namespace trueshard::comm
