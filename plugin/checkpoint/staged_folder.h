// SPDX-License-Identifier: BSD-3-Clause
// Role: the one act that makes a save visible. Everything is written into a hidden folder beside the destination,
// which then takes the destination's place: by rename, or by an exchange of the two names where one is there already.
// Invariants: I1 until commit() the destination is untouched. I2 at every moment the destination is the whole old or
// the whole new checkpoint. I3 nothing that trueshard did not write is removed. I4 what a killed save left behind is
// removed by the next save of the same destination and never read.
// Threads: one. Errors: FormatError.
#pragma once
#include <optional>
#include <string>

#include "plugin/checkpoint/files.h"

namespace trueshard::checkpoint {

class StagedFolder {
 public:
  // By one rank. Refuses a destination that holds files of others, and, before anything is written, a file system that
  // cannot exchange two folders when the destination exists.
  static StagedFolder prepare(const std::string& destination, const std::string& id);
  // By the other ranks, once it is there.
  static Folder open(const std::string& destination, const std::string& id);

  const Folder& folder() const { return *folder_; }
  // All files are complete and synced; syncs the folder and lets it take the destination's place.
  void commit();
  void discard() noexcept;

 private:
  StagedFolder() = default;
  std::string destination_, parent_, staged_path_;
  bool replaces_ = false;  // the destination exists
  std::optional<Folder> folder_;
};

std::string staged_path(const std::string& destination, const std::string& id);

}  // namespace trueshard::checkpoint
