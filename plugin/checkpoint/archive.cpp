// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/archive.h"

#include <algorithm>
#include <filesystem>

#include "plugin/checkpoint/strict_json.h"

namespace trueshard::checkpoint {

namespace fs = std::filesystem;

namespace {

constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";  // as PyTorch's Hugging Face writer names it
constexpr const char* kOffsets = "saved_offsets";

// What PyTorch writes about shards: tensor -> position of its first element; empty: the file holds whole tensors.
std::map<std::string, std::vector<int64_t>> positions_of(const Header& header, const std::string& where) {
  std::map<std::string, std::vector<int64_t>> positions;
  const auto found = header.metadata.find(kShardingInfo);
  if (found == header.metadata.end()) return positions;
  const Json json = parse_json(found->second, 3, where + ": " + kShardingInfo);
  const Field info(json, where + ": " + kShardingInfo);
  for (const auto& item : info.object().items())
    positions[item.key()] = Field(item.value(), info.path() + "." + item.key())[kOffsets].shape();
  return positions;
}

}  // namespace

Archive::Archive(const std::string& path) : path_(path) {
  const fs::path given(path);
  if (!fs::is_directory(given)) {
    if (!fs::exists(given)) throw FormatError("'" + path + "' does not exist");
    const auto parent = given.parent_path();
    folder_.emplace(Folder::open(parent.empty() ? "." : parent.string()));
    add_file(given.filename().string());
  } else {
    folder_.emplace(Folder::open(path));
    const auto names = folder_->names();
    if (folder_->contains(kManifestName)) {
      manifest_ = read_manifest(*folder_);
      for (const auto& stored : manifest_->files) add_file(stored.name);
    } else {
      for (const auto& name : names) {
        if (fs::path(name).extension() == ".safetensors") add_file(name);
      }
      if (tensors_.empty()) {
        const bool dcp = folder_->contains(".metadata");
        throw FormatError("'" + path + "' holds no safetensors file" +
                          (dcp ? "; PyTorch's own DCP format can be read by Python only. There: "
                                 "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, 'all.pt'), then "
                                 "safetensors.torch.save_file(torch.load('all.pt')['model'], 'model.safetensors')"
                               : ""));
      }
    }
  }
  std::sort(tensors_.begin(), tensors_.end(), [](const ArchivedTensor& a, const ArchivedTensor& b) {
    return a.owner != b.owner ? a.owner < b.owner : a.name < b.name;
  });
  for (size_t i = 0; i < tensors_.size(); ++i) index_[{tensors_[i].owner, tensors_[i].name}] = i;
  if (manifest_) {
    for (const auto& stored_file : manifest_->files) {
      for (const auto& stored : stored_file.tensors)
        tensors_[index_.at({stored_file.name, stored.name})].crc32c = stored.crc32c;
    }
  }
  require_whole();
}

void Archive::add_file(const std::string& name) {
  const std::string where = "'" + folder_->path() + "/" + name + "'";
  const Header header = read_header(file(name));
  const auto positions = positions_of(header, where);
  for (const auto& tensor : header.tensors) {
    ArchivedPiece piece{name, header.data_offset + tensor.begin, tensor.shape, {}};
    piece.position.assign(tensor.shape.size(), 0);
    if (!positions.empty()) {
      const auto found = positions.find(tensor.name);
      if (found == positions.end() || found->second.size() != tensor.shape.size())
        throw FormatError(where + ": " + kShardingInfo + " does not say where '" + tensor.name + "' lies");
      piece.position = found->second;
    }
    add_piece(tensor, std::move(piece), !positions.empty());
  }
}

void Archive::add_piece(const TensorInfo& info, ArchivedPiece piece, bool sharded) {
  const std::string owner = manifest_ ? piece.file : "";
  std::vector<int64_t> reach(info.shape.size());
  for (size_t d = 0; d < reach.size(); ++d) {
    if (__builtin_add_overflow(piece.position[d], info.shape[d], &reach[d]))
      throw FormatError("'" + piece.file + "': the position of '" + info.name + "' does not fit in 63 bits");
  }
  const auto known = index_.find({owner, info.name});
  if (known != index_.end()) {
    auto& tensor = tensors_[known->second];
    if (!sharded || tensor.dtype != info.dtype || tensor.shape.size() != reach.size())
      throw FormatError("'" + piece.file + "' and '" + tensor.pieces[0].file + "' in '" + path_ +
                        "' both hold a tensor '" + info.name + "'; give one file, or a folder of each");
    for (size_t d = 0; d < reach.size(); ++d) tensor.shape[d] = std::max(tensor.shape[d], reach[d]);
    tensor.pieces.push_back(std::move(piece));
    return;
  }
  ArchivedTensor tensor{info.name, info.dtype, reach, {std::move(piece)}, std::nullopt, owner};
  index_[{owner, info.name}] = tensors_.size();
  tensors_.push_back(std::move(tensor));
}

// Pieces must not overlap and together have as many elements as the tensor.
void Archive::require_whole() const {
  for (const auto& tensor : tensors_) {
    const int64_t item = itemsize(tensor.dtype);
    const auto elements = elements_of(tensor.shape, item);
    if (!elements) throw FormatError("'" + path_ + "': tensor '" + tensor.name + "' is too large");
    int64_t there = 0;
    for (size_t i = 0; i < tensor.pieces.size(); ++i) {
      const auto& a = tensor.pieces[i];
      there += elements_of(a.shape, item).value_or(0);
      for (size_t j = 0; j < i; ++j) {
        const auto& b = tensor.pieces[j];
        bool overlap = true;
        for (size_t d = 0; d < tensor.shape.size(); ++d)
          overlap &= a.position[d] < b.position[d] + b.shape[d] && b.position[d] < a.position[d] + a.shape[d];
        if (overlap)
          throw FormatError("'" + path_ + "': pieces of tensor '" + tensor.name + "' in '" + a.file + "' and '" +
                            b.file + "' overlap");
      }
    }
    if (there != *elements)
      throw FormatError("'" + path_ + "': tensor '" + tensor.name + "' " + describe_shape(tensor.shape) + " lacks " +
                        std::to_string(*elements - there) + " elements; a file of the set is missing");
  }
}

const File& Archive::file(const std::string& name) {
  auto found = files_.find(name);
  if (found == files_.end()) found = files_.emplace(name, folder_->open_file(name)).first;
  return found->second;
}

const ArchivedTensor* Archive::find(const std::string& owner, const std::string& name) const {
  const auto found = index_.find({owner, name});
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

void Archive::read(const ArchivedTensor& tensor, const ArchivedPiece& piece, int64_t chunk,
                   const std::function<void(const std::byte*, int64_t)>& take) {
  const int64_t bytes = elements_of(piece.shape, itemsize(tensor.dtype)).value_or(0) * itemsize(tensor.dtype);
  staging_.resize(static_cast<size_t>(std::max(chunk, int64_t{64})));
  const auto step = static_cast<int64_t>(staging_.size() / 64 * 64);  // whole elements of every dtype
  for (int64_t at = 0; at < bytes; at += step) {
    const int64_t count = std::min(step, bytes - at);
    file(piece.file).read(staging_.data(), count, piece.offset + at);
    take(staging_.data(), count);
  }
}

}  // namespace trueshard::checkpoint
