// SPDX-License-Identifier: BSD-3-Clause
// Role: one save: what is stored, by whom, where in which file; and its writing.
// All ranks write their parts of the same files, which are laid out as if one program had written them: a checkpoint
// does not depend on the number of ranks. Invariants: I1 nothing is visible before commit. I2 every element is written
// by one rank. I3 after take_snapshot() the program may change everything. Threads: constructed by the thread that
// makes all collective calls; write() on any one thread. Errors: c10::Error, the same on all ranks; the destination is
// then as it was.
#pragma once
#include "plugin/checkpoint/conversation.h"
#include "plugin/checkpoint/live_state.h"
#include "plugin/checkpoint/part.h"

namespace trueshard::checkpoint {

struct SaveRequest {
  std::vector<Target> targets;
  std::shared_ptr<comm::Transport> transport;  // null: alone
  std::string destination;
  int64_t chunk_bytes = int64_t{8} << 20;  // in one write
};

class SaveJob {
 public:
  explicit SaveJob(const SaveRequest& request);  // collective: ranks agree on what is stored
  void take_snapshot();                          // copies this rank's part
  void write();                                  // collective
  int64_t bytes() const;                         // of this rank's part

 private:
  void write_headers(const class StagedFolder& staged) const;
  std::string write_parts(const Folder& folder) const;  // shares of all tensors, as bytes
  void finish(class StagedFolder& staged, const std::vector<std::string>& shares);
  int rank() const { return conversation_->rank(); }

  std::string destination_, id_;
  int64_t chunk_bytes_;
  std::vector<PlannedFile> files_;
  std::vector<Part> parts_;  // this rank's, in order of file and offset
  Manifest manifest_;        // without sums
  std::unique_ptr<Conversation> conversation_;
};

}  // namespace trueshard::checkpoint
