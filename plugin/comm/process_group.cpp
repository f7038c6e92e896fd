// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/comm/process_group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "plugin/comm/backend.h"
#include "plugin/comm/errors.h"
#include "plugin/comm/torch_version.h"

namespace trueshard::comm {
namespace {

// A folder of this user only, on this host.
std::string user_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  std::string parent = runtime != nullptr && ::access(runtime, W_OK | X_OK) == 0 ? runtime : "/tmp";
  const std::string folder = parent + "/trueshard-" + std::to_string(::geteuid());
  struct stat status {};
  const bool made = ::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST;
  TORCH_CHECK(made && ::lstat(folder.c_str(), &status) == 0, "trueshard: init_process_group: making the folder ",
              folder, " for the ranks' store failed: ", std::strerror(errno),
              "; set MASTER_ADDR and MASTER_PORT to use a TCP store");
  TORCH_CHECK(S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & 077) == 0,
              "trueshard: init_process_group: ", folder,
              " must be a folder that only its owner can use (mode 0700); remove it, or "
              "set MASTER_ADDR and MASTER_PORT to use a TCP store");
  return folder;
}

c10::intrusive_ptr<c10d::Store> open_store(const Launch& launch, std::chrono::milliseconds timeout) {
  try {
    if (launch.store == Launch::Store::kFile) {
      return c10::make_intrusive<c10d::FileStore>(user_folder() + "/" + launch.job, launch.size);
    }
    if (launch.store == Launch::Store::kTcp) {
      c10d::TCPStoreOptions options;
      options.port = launch.port;
      options.isServer = launch.host_store;
      options.numWorkers = static_cast<size_t>(launch.size);
      options.waitWorkers = false;
      options.timeout = timeout;
      options.multiTenant = true;
      return c10::make_intrusive<c10d::TCPStore>(launch.host, options);
    }
    return c10::make_intrusive<c10d::HashStore>();
  } catch (const std::exception& error) {
    const std::string place =
        launch.store == Launch::Store::kTcp ? launch.host + ":" + std::to_string(launch.port) : launch.job;
    throw_backend_error("trueshard[rank " + std::to_string(launch.rank) + "/" + std::to_string(launch.size) +
                        "] init_process_group: the store at " + place + " cannot be reached: " + text_of(error) +
                        "; check MASTER_ADDR and MASTER_PORT, and that rank 0 runs");
  }
}

std::string next_name(const GroupRequest& request) {
  static std::mutex mutex;
  static int64_t alone = 0;
  if (!request.store) {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::string("trueshard_").append(std::to_string(++alone));
  }
  // Counted in the store, by rank: ranks that are threads of one process count separately.
  const auto number = request.store->add("trueshard/groups/" + std::to_string(request.rank), 1);
  return std::string("trueshard_").append(std::to_string(number));
}

// c10d's registry has one name for one group of a process, and keeps the names of groups that are gone.
void register_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& wanted) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  std::string name = wanted;
  for (int attempt = 1;; ++attempt) {
    bool taken = true;
    try {
      c10d::resolve_process_group(name);
    } catch (const c10::Error&) {
      taken = false;
    }
    if (!taken) break;
    name = wanted + "#" + std::to_string(attempt);
  }
  c10d::unregister_process_group(name);
  group->setGroupName(name);
  c10d::register_process_group(name, group);
}

}  // namespace

c10::intrusive_ptr<c10d::Store> store_for(const Launch& launch, std::chrono::milliseconds timeout) {
  if (launch.store == Launch::Store::kNone) return nullptr;
  static std::mutex mutex;
  static c10::intrusive_ptr<c10d::Store> store;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!store || owner != ::getpid()) {
    store = c10::make_intrusive<c10d::PrefixStore>(launch.prefix, open_store(launch, timeout));
    owner = ::getpid();
  }
  return store;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupRequest& request) {
  require_compatible_torch();
  TORCH_CHECK(request.size >= 1 && request.rank >= 0 && request.rank < request.size,
              "trueshard: init_process_group: rank ", request.rank, " of ", request.size,
              " ranks is not possible, expected 0 <= rank < world_size");
  TORCH_CHECK(request.timeout.count() > 0, "trueshard: init_process_group: the timeout is ", request.timeout.count(),
              " ms, expected more than 0");
  TORCH_CHECK(request.store || request.size == 1, "trueshard: init_process_group: ", request.size,
              " ranks need a store that they all share, got none");
  const std::string name = request.name.empty() ? next_name(request) : request.name;
  const auto backend = make_backend(request.store, request.rank, request.size, name, request.timeout);
  c10::intrusive_ptr<c10d::Store> store = request.store;
  if (!store) store = c10::make_intrusive<c10d::HashStore>();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::PrefixStore>(name, store),
                                                       request.rank, request.size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  register_group(group, name);
  return group;
}

}  // namespace trueshard::comm
