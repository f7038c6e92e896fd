// SPDX-License-Identifier: BSD-3-Clause
// The extension module trueshard._C: hands the backend to torch.distributed. Everything else that Python sees are
// operators and classes that the library itself registers. Waits never hold the interpreter's lock.
#include <dlfcn.h>

#include <string>
#include <vector>

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "plugin/comm/backend.h"
#include "python/sharding.h"

namespace trueshard::python {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

std::vector<c10::weak_intrusive_ptr<c10d::Backend>>& backends() {  // of this process; guarded by the interpreter's lock
  static auto* const the_backends = new std::vector<c10::weak_intrusive_ptr<c10d::Backend>>();
  return *the_backends;
}

// Before the interpreter ends: a thread that lets go of a tensor then would wait for a lock that is never given again.
void close_backends() {
  std::vector<BackendPtr> alive;
  for (const auto& weak : backends()) {
    if (BackendPtr backend = weak.lock()) alive.push_back(std::move(backend));
  }
  const pybind11::gil_scoped_release release;
  for (const BackendPtr& backend : alive) comm::close_backend(*backend);
}

BackendPtr create_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                          const std::string& group_name, std::chrono::milliseconds timeout) {
  BackendPtr backend;
  {
    const pybind11::gil_scoped_release release;
    backend = comm::make_backend(store, rank, size, group_name, timeout);
  }
  std::erase_if(backends(), [](const auto& weak) { return weak.expired(); });
  backends().emplace_back(backend);
  return backend;
}

void monitored_barrier(const BackendPtr& backend, std::chrono::milliseconds timeout, bool wait_all_ranks) {
  const pybind11::gil_scoped_release release;
  c10d::BarrierOptions options;
  options.timeout = timeout;
  backend->monitoredBarrier(options, wait_all_ranks);
}

// Where the shared library lies that this module is linked to.
std::string library_path() {
  Dl_info info{};
  const auto address = reinterpret_cast<void*>(&comm::make_backend);
  TORCH_CHECK(::dladdr(address, &info) != 0 && info.dli_fname != nullptr, "trueshard: the library's file is unknown");
  return info.dli_fname;
}

// A destructor that joins a thread must not hold the lock which a callback on that thread waits for.
void without_lock(void (*function)(void*), void* argument) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const pybind11::gil_scoped_release release;
    function(argument);
  } else {
    function(argument);
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  comm::set_blocking_call(&without_lock);
  module.def("create_backend", &create_backend);
  module.def("monitored_barrier", &monitored_barrier);
  module.def("close_backends", &close_backends);
  module.def("library_path", &library_path);
  bind_sharding(module);
}

}  // namespace trueshard::python
