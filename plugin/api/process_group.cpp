// SPDX-License-Identifier: BSD-3-Clause
#include <trueshard/process_group.h>

#include "plugin/comm/process_group.h"

namespace trueshard {

c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(ProcessGroupOptions options) {
  const comm::Launch launch = comm::parse_launch(comm::launch_variables());
  return comm::make_process_group(
      {comm::store_for(launch, options.timeout()), launch.rank, launch.size, options.group_name(), options.timeout()});
}

c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                          int world_size, ProcessGroupOptions options) {
  return comm::make_process_group({store, rank, world_size, options.group_name(), options.timeout()});
}

}  // namespace trueshard
