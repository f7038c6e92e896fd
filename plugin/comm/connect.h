// SPDX-License-Identifier: BSD-3-Clause
// Role: the way from a store to a transport, with the one choice that tests make and users never do.
// Threads, Errors: as connect() in transport.h.
#pragma once
#include "plugin/comm/identity.h"
#include "plugin/comm/store_exchange.h"
#include "plugin/comm/transport.h"

namespace trueshard::comm {

struct ConnectTestOptions {
  std::string hostname;              // pretend to run there
  bool other_pid_namespace = false;  // pretend that /proc/<pid> of the peers is of no use
};
std::shared_ptr<Transport> connect_as(const StoreEnds& ends, const ConnectTestOptions& options);

}  // namespace trueshard::comm
