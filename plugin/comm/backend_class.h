// SPDX-License-Identifier: BSD-3-Clause
// Role: the class behind make_backend(). Calls check their arguments, make a fingerprint and a closure over the
// Conduit, and start it; nothing here moves bytes. Invariants: I1 a call whose arguments are impossible on this rank
// still takes part (Conduit::refuse), so that every rank gets an error and the group stays usable. I2 only the old c10d
// names are overridden: newer torch forwards its new names to them. Threads, Errors: see backend.h.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plugin/comm/conduit.h"
#include "plugin/comm/point_to_point.h"
#include "plugin/comm/torch_compat.h"
#include "plugin/comm/work.h"

namespace trueshard::comm {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Backend final : public c10d::Backend {
 public:
  Backend(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout);
  ~Backend() override;
  // What the destructor does, and may be done before it: ends what is under way, and the threads.
  void close();
  const std::shared_ptr<Transport>& transport() const { return transport_; }

  const std::string getBackendName() const override { return "trueshard"; }
  // A copy: c10d writes into what it gets here when it splits a group.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // every rank counts its calls; all start at 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  void shutdown() override;
  void abort() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  // What is called between the two starts at once, as if it were asynchronous; the work of the end waits for all of it.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // What all calls have in common. `refusal` (not empty: why this rank cannot) decides between `run` and refusing.
  struct Request {
    c10d::OpType type;
    const char* name;  // "allreduce"
    std::chrono::milliseconds timeout;
    bool async = true;
    CollectiveCall call{};
    std::string refusal{};
    Tensors inputs{};
    Tensors outputs{};
    std::function<void(Conduit&, const CollectiveCall&)> run{};
  };
  WorkPtr start(Request request);
  void execute(const Request& request, uint64_t sequence);
  WorkPtr start_all_reduce(Request request, const Tensors& tensors, const c10d::ReduceOp& op);
  WorkPtr start_reduce_scatter(Request request, const std::vector<Tensors>& inputs, const Tensors& outputs,
                               const c10d::ReduceOp& op);
  WorkPtr start_transfer(Transfer transfer, const Tensors& tensors);
  void check_usable(const char* call) const;
  WorkPtr start_all_gather(Request request, const Tensors& inputs, const std::vector<Tensors>& outputs);

  bool forked() const noexcept;
  void abandon() noexcept;

  std::shared_ptr<Transport> transport_;
  std::unique_ptr<Conduit> conduit_;
  c10::intrusive_ptr<BackendOptions> options_;
  uint64_t sequence_ = 0;
  int64_t process_;  // that made it
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<CollectiveWork>> coalesced_;
  std::unique_ptr<PointToPoint> transfers_;
  WorkQueue queue_;  // last: its worker ends before anything it uses
};

}  // namespace trueshard::comm
