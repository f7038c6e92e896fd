// SPDX-License-Identifier: BSD-3-Clause
// Point-to-point transfers, coalescing, and what makes a group out of a part of this one.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "plugin/comm/backend.h"
#include "plugin/comm/backend_class.h"
#include "plugin/comm/errors.h"
#include "plugin/comm/tensors.h"

namespace trueshard::comm {
namespace {

std::string refuse_transfer(const Tensors& tensors, const Transfer& transfer) {
  if (tensors.size() != 1) return std::to_string(tensors.size()) + " tensors, expected 1";
  return transfer.kind == Transfer::Kind::kSend ? refuse_input(tensors[0]) : refuse_output(tensors[0]);
}

// Completes `whole` when all parts have ended, with the error of the first part, in their order, that has one.
struct Gathering {
  std::mutex mutex;
  size_t left;
  c10::intrusive_ptr<CollectiveWork> whole;
  std::vector<c10::intrusive_ptr<CollectiveWork>> parts;

  void one_ended() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (--left > 0) return;
    }
    std::exception_ptr error;
    for (const auto& part : parts) {
      if (!error) error = part->exception();
    }
    parts.clear();
    whole->complete(error);
  }
};

}  // namespace

WorkPtr Backend::start_transfer(Transfer transfer, const Tensors& tensors) {
  const bool send = transfer.kind == Transfer::Kind::kSend;
  check_usable(send ? "send" : "recv");
  TORCH_CHECK(transfer.peer >= (send ? 0 : kAnyRank) && transfer.peer < size_,
              where(rank_, size_, transport_->group_name()), send ? " send to" : " recv from", " rank ", transfer.peer,
              ": expected 0 to ", size_ - 1);
  const auto type = send                        ? c10d::OpType::SEND
                    : transfer.peer == kAnyRank ? c10d::OpType::RECVANYSOURCE
                                                : c10d::OpType::RECV;
  transfer.work = c10::make_intrusive<CollectiveWork>(rank_, type, send ? "trueshard:send" : "trueshard:recv", tensors,
                                                      send ? Tensors{} : tensors);
  transfer.refusal = refuse_transfer(tensors, transfer);
  if (transfer.refusal.empty()) {
    const at::Tensor& tensor = tensors[0];
    transfer.memory = send ? DenseTensor::to_read(tensor) : DenseTensor::to_write(tensor);
    transfer.elements = tensor.numel();
    transfer.bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    transfer.dtype = dtype_code(tensor.scalar_type());
  }
  if (coalescing_) coalesced_.push_back(transfer.work);
  const WorkPtr work = transfer.work;
  transfers_->start(std::move(transfer));
  return work;
}

WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  Transfer transfer;
  transfer.kind = Transfer::Kind::kSend;
  transfer.peer = to;
  transfer.tag = tag;
  return start_transfer(std::move(transfer), tensors);
}

WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  TORCH_CHECK(from >= 0, where(rank_, size_, transport_->group_name()), " recv from rank ", from, ": expected 0 to ",
              size_ - 1);
  Transfer transfer;
  transfer.kind = Transfer::Kind::kReceive;
  transfer.peer = from;
  transfer.tag = tag;
  return start_transfer(std::move(transfer), tensors);
}

WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  Transfer transfer;
  transfer.kind = Transfer::Kind::kReceive;
  transfer.peer = kAnyRank;
  transfer.tag = tag;
  return start_transfer(std::move(transfer), tensors);
}

void Backend::startCoalescing() {
  check_usable("startCoalescing");
  TORCH_CHECK(!coalescing_, where(rank_, size_, transport_->group_name()),
              " startCoalescing: calls are being coalesced already; end that first");
  coalesced_.clear();
  coalescing_ = true;
}

WorkPtr Backend::endCoalescing() {
  TORCH_CHECK(coalescing_, where(rank_, size_, transport_->group_name()),
              " endCoalescing: no calls are being coalesced; call startCoalescing() first");
  coalescing_ = false;
  auto gathering = std::make_shared<Gathering>();
  gathering->parts.swap(coalesced_);
  Tensors outputs;
  for (const auto& part : gathering->parts) {
    const Tensors results = part->result();
    outputs.insert(outputs.end(), results.begin(), results.end());
  }
  auto whole =
      c10::make_intrusive<CollectiveWork>(rank_, c10d::OpType::COALESCED, "trueshard:coalesced", Tensors{}, outputs);
  gathering->whole = whole;
  gathering->left = gathering->parts.size() + 1;
  const auto parts = gathering->parts;
  for (const auto& part : parts) {
    part->getFuture()->addCallback([gathering](c10::ivalue::Future&) { gathering->one_ended(); });
  }
  gathering->one_ended();
  return whole;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  check_usable("split");
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;  // this rank is in no part
  const std::string name =
      options && !options->group_name.empty() ? options->group_name : transport_->group_name() + ":split";
  return make_backend(store, static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()), name,
                      options ? options->timeout : options_->timeout);
}

}  // namespace trueshard::comm
