// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/backend.h"

#include <unistd.h>

#include "plugin/comm/backend_class.h"
#include "plugin/comm/errors.h"
#include "plugin/comm/names.h"
#include "plugin/comm/torch_version.h"
#include "plugin/observe/trace.h"

namespace trueshard::comm {
namespace {

constexpr int kMostRanks = 255;  // operands of one sum program

c10::intrusive_ptr<c10d::Backend> backend_of(const c10d::ProcessGroup& group) {
  auto& asked = const_cast<c10d::ProcessGroup&>(group);  // getBackend is not const, though it changes nothing we see
  try {
    return asked.getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error&) {
    return nullptr;  // no backend for CPU
  }
}

}  // namespace

Backend::Backend(std::shared_ptr<Transport> transport, std::chrono::milliseconds timeout)
    : c10d::Backend(transport->rank(), transport->size()),
      transport_(std::move(transport)),
      conduit_(std::make_unique<Conduit>(transport_)),
      options_(c10::make_intrusive<BackendOptions>(timeout)),
      process_(::getpid()),
      transfers_(std::make_unique<PointToPoint>(transport_)) {
  options_->group_name = transport_->group_name();
  init();
}

bool Backend::forked() const noexcept { return ::getpid() != process_; }

// A forked child has neither the worker nor a place among the ranks: it leaves everything as it is.
void Backend::abandon() noexcept {
  queue_.abandon();
  transfers_->abandon();
  new std::unique_ptr<Conduit>(std::move(conduit_));
  new std::shared_ptr<Transport>(std::move(transport_));
}

Backend::~Backend() {
  if (forked()) {
    abandon();
  } else {
    close();
  }
}

void Backend::close() {
  if (forked()) return;
  // An operation under way waits for other ranks; it is ended, so that the threads can be joined without waiting for
  // them.
  const auto destroyed = std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      where(rank_, size_, transport_->group_name()) + ": the group was destroyed before this operation began"));
  queue_.stop(destroyed);
  transfers_->stop(destroyed);
  if (!queue_.idle()) {
    transport_->fail(where(rank_, size_, transport_->group_name()) +
                     ": the group was destroyed while an operation was under way; "
                     "wait() for the work that the last calls returned before letting the group go");
  }
  queue_.join();
  transfers_->join();
}

void close_backend(c10d::Backend& backend) {
  if (auto* ours = dynamic_cast<Backend*>(&backend)) ours->close();
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<BackendOptions>(*options_);
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  transport_->set_timeout(timeout);
}

c10d::ErrorType Backend::getError() {
  return transport_->failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void Backend::shutdown() {
  if (forked()) return;
  queue_.wait_until_complete();
  transfers_->wait_until_complete();
  const auto down = std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      where(rank_, size_, transport_->group_name()) + ": the group was shut down; make a new group for further calls"));
  queue_.stop(down);
  transfers_->stop(down);
}

void Backend::abort() {
  if (forked()) return;
  transport_->fail(where(rank_, size_, transport_->group_name()) + ": abort() was called");
}

void Backend::check_usable(const char* call) const {
  transport_->check_process(call);
  transport_->throw_if_failed();
}

WorkPtr Backend::start(Request request) {
  check_usable(request.name);
  ++sequence_;
  if (request.timeout.count() > 0) request.call.timeout = request.timeout;
  const std::string title = std::string("trueshard:") + request.name;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, request.type, title.c_str(), request.inputs, request.outputs);
  work->sequence = sequence_;
  const bool async = request.async || coalescing_;
  if (coalescing_) coalesced_.push_back(work);
  auto shared = std::make_shared<Request>(std::move(request));
  work->operation = [this, shared, sequence = sequence_] { execute(*shared, sequence); };
  if (async) {
    queue_.start(work);
  } else {
    queue_.start_here_if_idle(work);
  }
  return work;
}

void Backend::execute(const Request& request, uint64_t sequence) {
  const int64_t start_ns = observe::trace_enabled() ? observe::now_ns() : 0;
  const std::string here = where(rank_, size_, transport_->group_name()) + " " + request.name;
  if (!request.refusal.empty()) {
    conduit_->refuse(request.call);
    TORCH_CHECK(false, here, ": ", request.refusal);
  }
  try {
    request.run(*conduit_, request.call);
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    // The others are in the middle of it: they must not wait for this rank.
    transport_->fail(here + ": " + text_of(error));
    throw;
  }
  if (start_ns == 0) return;
  const uint32_t dtype = request.call.fingerprint.dtype;
  const std::string dtype_text = dtype == 0 ? "none" : dtype_name(static_cast<c10::ScalarType>(dtype - 1));
  observe::TraceEvent event;
  event.group = transport_->group_name().c_str();
  event.channel = "collectives";
  event.operation = request.name;
  event.dtype = dtype_text.c_str();
  event.rank = rank_;
  event.sequence = sequence;
  event.elements = request.call.fingerprint.elements;
  event.start_ns = start_ns;
  event.end_ns = observe::now_ns();
  observe::trace(event);
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  Request request{c10d::OpType::BARRIER, "barrier", options.timeout, options.asyncOp};
  request.call.fingerprint = Fingerprint::of("barrier");
  request.run = [](Conduit& conduit, const CollectiveCall& call) { conduit.barrier(call); };
  return start(std::move(request));
}

// Every rank that did not come is named, whatever wait_all_ranks says: nothing is saved by naming one only.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  Request request{c10d::OpType::BARRIER, "monitored_barrier", options.timeout, false};
  request.call.fingerprint = Fingerprint::of("monitored_barrier");
  request.run = [](Conduit& conduit, const CollectiveCall& call) { conduit.barrier(call); };
  start(std::move(request))->wait();
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const std::string& group_name, std::chrono::milliseconds timeout) {
  require_compatible_torch();
  TORCH_CHECK(size <= kMostRanks, where(rank, size, group_name), ": a group has at most ", kMostRanks,
              " ranks in this version");
  return c10::make_intrusive<Backend>(connect(store, rank, size, group_name, timeout), timeout);
}

std::shared_ptr<Transport> transport_of(const c10d::ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Backend> backend = backend_of(group);
  const auto* ours = dynamic_cast<const Backend*>(backend.get());
  TORCH_CHECK(ours != nullptr, "trueshard: this process group uses the backend '",
              backend ? backend->getBackendName() : std::string("none for CPU"),
              "', expected 'trueshard'; make it with trueshard::init_process_group()");
  return ours->transport();
}

}  // namespace trueshard::comm
