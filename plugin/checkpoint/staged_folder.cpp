// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/staged_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <unordered_set>

#include "plugin/checkpoint/manifest.h"

namespace trueshard::checkpoint {

namespace fs = std::filesystem;

namespace {

constexpr const char* kStagedMark = ".saving-";

// The folder that the path means: links to it are followed, so that what they lead to is replaced and not they.
fs::path resolved(const std::string& destination) {
  std::error_code error;
  fs::path path = fs::weakly_canonical(fs::absolute(destination), error);
  if (error || path.empty()) throw FormatError("cannot use '" + destination + "': " + error.message());
  if (path.filename().empty()) path = path.parent_path();
  if (path.filename().empty()) throw FormatError("'" + destination + "' is not a place for a checkpoint");
  return path;
}

std::string stale_prefix(const fs::path& destination) { return "." + destination.filename().string() + kStagedMark; }

void make_folder(const std::string& path) {
  note_write("make folder");
  if (::mkdir(path.c_str(), 0777) != 0)
    throw FormatError("cannot make the folder '" + path + "': " + system_reason(errno));
}

void exchange(const std::string& a, const std::string& b) {
  note_write("exchange");
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  const int error = errno;
  if (error == EINVAL || error == ENOSYS || error == ENOTSUP) {
    throw FormatError("the file system of '" + b +
                      "' cannot exchange two folders in one act, so an existing checkpoint can not be replaced safely; "
                      "save to a new name");
  }
  throw FormatError("cannot exchange '" + a + "' and '" + b + "': " + system_reason(error));
}

// Throws when replacing the folder would remove something that is not a checkpoint's.
void require_replaceable(const Folder& folder) {
  const auto names = folder.names();
  if (names.empty()) return;
  const std::string advice = "; move it away, or save to another folder";
  if (!folder.contains(kManifestName))
    throw FormatError("'" + folder.path() + "' exists and is not a trueshard checkpoint ('" + names[0] + "')" + advice);
  std::optional<Manifest> manifest;
  try {
    const File file = folder.open_file(kManifestName);
    std::string text(static_cast<size_t>(file.size()), '\0');
    file.read(text.data(), file.size(), 0);
    manifest = parse_manifest(text, kManifestName);
  } catch (const FormatError&) {
    // A damaged checkpoint may be replaced; its files are then known by their kind.
  }
  for (const std::string& name : names) {
    const bool ours = name == kManifestName ||
                      (manifest ? manifest->file(name) != nullptr : fs::path(name).extension() == ".safetensors");
    if (!ours)
      throw FormatError("'" + folder.path() + "/" + name + "' is not part of the checkpoint that is replaced" + advice);
  }
}

void sync_folder(const std::string& path) { Folder::open(path).sync(); }

void remove_stale(const std::string& parent, const std::string& prefix) {
  for (const std::string& name : Folder::open(parent).names()) {
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    note_write("remove stale");
    std::error_code error;
    fs::remove_all(fs::path(parent) / name, error);
    if (error)
      throw FormatError("cannot remove what a broken save left in '" + parent + "/" + name + "': " + error.message());
  }
}

}  // namespace

std::string staged_path(const std::string& destination, const std::string& id) {
  const fs::path path = resolved(destination);
  return (path.parent_path() / (stale_prefix(path) + id)).string();
}

StagedFolder StagedFolder::prepare(const std::string& destination, const std::string& id) {
  StagedFolder staged;
  const fs::path path = resolved(destination);
  staged.destination_ = path.string();
  staged.parent_ = path.parent_path().string();
  staged.staged_path_ = staged_path(destination, id);
  std::error_code error;
  fs::create_directories(staged.parent_, error);
  if (error) throw FormatError("cannot make the folder '" + staged.parent_ + "': " + error.message());
  remove_stale(staged.parent_, stale_prefix(path));
  const auto status = fs::symlink_status(path, error);
  staged.replaces_ = fs::exists(status);
  if (staged.replaces_) {
    if (!fs::is_directory(status)) throw FormatError("'" + staged.destination_ + "' exists and is not a folder");
    require_replaceable(Folder::open(staged.destination_));
  }
  make_folder(staged.staged_path_);
  try {
    if (staged.replaces_) {  // tried on two empty folders, so that it is known before much is written
      const std::string probe = staged.staged_path_ + ".probe";
      make_folder(probe);
      exchange(staged.staged_path_, probe);
      ::rmdir(probe.c_str());
    }
    staged.folder_.emplace(Folder::open(staged.staged_path_));
  } catch (...) {
    staged.discard();
    throw;
  }
  return staged;
}

Folder StagedFolder::open(const std::string& destination, const std::string& id) {
  const std::string path = staged_path(destination, id);
  try {
    return Folder::open(path);
  } catch (const FormatError& error) {
    throw FormatError(std::string(error.what()) + "; all ranks must see the same file system");
  }
}

void StagedFolder::commit() {
  folder_->sync();
  if (replaces_) {
    exchange(staged_path_, destination_);
  } else {
    note_write("rename");
    if (::rename(staged_path_.c_str(), destination_.c_str()) != 0)
      throw FormatError("cannot rename '" + staged_path_ + "' to '" + destination_ + "': " + system_reason(errno));
  }
  sync_folder(parent_);
  if (replaces_) discard();  // the old checkpoint has the hidden name now
}

void StagedFolder::discard() noexcept {
  std::error_code ignored;  // what stays has a hidden name and is removed by the next save
  note_write("remove");
  fs::remove_all(staged_path_, ignored);
  fs::remove_all(staged_path_ + ".probe", ignored);
}

}  // namespace trueshard::checkpoint
