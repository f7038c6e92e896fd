// SPDX-License-Identifier: BSD-3-Clause
// Role: the tensors of anything that consists of safetensors files: a checkpoint (with its manifest), a folder of plain
// files (Hugging Face, or PyTorch's DCP through its Hugging Face writer, whole or in shards), or one file.
// Invariants: I1 a tensor's name appears once, or its pieces say by their offsets where they lie and fill it without
// overlap. Threads: one. Errors: FormatError naming the file and the tensor.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/safetensors.h"

namespace trueshard::checkpoint {

struct ArchivedPiece {
  std::string file;
  int64_t offset = 0;             // in the file, bytes
  std::vector<int64_t> shape;     // of the piece
  std::vector<int64_t> position;  // of its first element in the tensor
};

struct ArchivedTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<ArchivedPiece> pieces;  // one: the whole tensor
  std::optional<uint32_t> crc32c;     // from a manifest
  std::string owner;                  // file of a manifest, else empty: names are unique within an owner
  int64_t bytes() const { return elements_of(shape, itemsize(dtype)).value_or(0) * itemsize(dtype); }
};

class Archive {
 public:
  explicit Archive(const std::string& path);
  const std::string& path() const { return path_; }
  const std::optional<Manifest>& manifest() const { return manifest_; }
  const std::vector<ArchivedTensor>& tensors() const { return tensors_; }  // by owner and name
  const ArchivedTensor* find(const std::string& owner, const std::string& name) const;
  // Passes the piece's bytes to `take` in order, at most `chunk` at a time.
  void read(const ArchivedTensor& tensor, const ArchivedPiece& piece, int64_t chunk,
            const std::function<void(const std::byte* data, int64_t bytes)>& take);

 private:
  void add_file(const std::string& name);
  void add_piece(const TensorInfo& info, ArchivedPiece piece, bool sharded);
  void require_whole() const;
  const File& file(const std::string& name);

  std::string path_;
  std::optional<Folder> folder_;
  std::optional<Manifest> manifest_;
  std::vector<ArchivedTensor> tensors_;
  std::map<std::pair<std::string, std::string>, size_t> index_;  // owner and name
  std::map<std::string, File> files_;
  std::vector<std::byte> staging_;
};

}  // namespace trueshard::checkpoint
