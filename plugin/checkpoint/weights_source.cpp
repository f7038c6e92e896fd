// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/weights_source.h"

#include <ATen/Functions.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstring>
#include <filesystem>
#include <unordered_map>

#include "plugin/checkpoint/archive.h"
#include "plugin/checkpoint/live_state.h"
#include "plugin/comm/errors.h"

namespace trueshard::checkpoint {

namespace {

class ArchiveSource : public WeightsSource {
 public:
  ArchiveSource(const std::string& path, const std::string& key) : archive_(path) {
    const StoredEntry* entry = nullptr;
    if (const auto& manifest = archive_.manifest()) {
      for (const auto& each : manifest->entries) {
        const bool has_weights = each.kind == EntryKind::kOptimizer || each.kind == EntryKind::kModule;
        if (has_weights && (each.key == key || !entry)) entry = &each;
      }
      if (!entry) throw FormatError("'" + path + "' holds no module");
    }
    for (const auto& tensor : archive_.tensors()) {
      if (entry && tensor.owner != entry->file) continue;
      if (!entry && tensor.name.compare(0, 6, "state.") == 0 && tensor.name.rfind('.') > 6) continue;
      tensors_[tensor.name] = &tensor;
      names_.push_back({tensor.name, tensor.shape, scalar_type_of(tensor.dtype)});
    }
  }
  const std::vector<Named>& names() const override { return names_; }
  at::Tensor read(const std::string& name, int64_t begin, int64_t end) override {
    const auto& tensor = *tensors_.at(name);
    if (tensor.pieces.size() > 1) return whole(tensor).flatten().slice(0, begin, end);
    auto piece = tensor.pieces[0];
    piece.offset += begin * itemsize(tensor.dtype);
    piece.shape = {end - begin};
    return read_piece(tensor, piece);
  }

 private:
  at::Tensor read_piece(const ArchivedTensor& tensor, const ArchivedPiece& piece) {
    auto value = at::empty(piece.shape, at::TensorOptions().dtype(scalar_type_of(tensor.dtype)));
    auto* at = static_cast<std::byte*>(value.data_ptr());
    archive_.read(tensor, piece, int64_t{8} << 20, [&](const std::byte* data, int64_t bytes) {
      std::memcpy(at, data, static_cast<size_t>(bytes));
      at += bytes;
    });
    return value;
  }
  at::Tensor whole(const ArchivedTensor& tensor) {
    auto value = at::empty(tensor.shape, at::TensorOptions().dtype(scalar_type_of(tensor.dtype)));
    for (const auto& piece : tensor.pieces) {
      auto part = value;
      for (size_t d = 0; d < piece.shape.size(); ++d)
        part = part.narrow(static_cast<int64_t>(d), piece.position[d], piece.shape[d]);
      part.copy_(read_piece(tensor, piece));
    }
    return value;
  }

  Archive archive_;
  std::unordered_map<std::string, const ArchivedTensor*> tensors_;
  std::vector<Named> names_;
};

class TensorSource : public WeightsSource {  // everything in memory, which is how libtorch reads
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    names_.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
    tensors_[name] = tensor.detach();
  }
  const std::vector<Named>& names() const override { return names_; }
  at::Tensor read(const std::string& name, int64_t begin, int64_t end) override {
    return tensors_.at(name).contiguous().flatten().slice(0, begin, end).clone();
  }

 private:
  std::unordered_map<std::string, at::Tensor> tensors_;
  std::vector<Named> names_;
};

// torch.save(module.state_dict()) or a dictionary that holds one under "model" or "state_dict".
void add_dictionary(TensorSource& source, const c10::IValue& value, const std::string& path) {
  if (!value.isGenericDict())
    throw FormatError("'" + path + "' holds a " + value.tagKind() + ", not a state dictionary");
  for (const auto& item : value.toGenericDict()) {
    if (!item.key().isString()) throw FormatError("'" + path + "' holds a dictionary whose keys are not names");
    const std::string name = item.key().toStringRef();
    if (item.value().isTensor()) {
      source.add(name, item.value().toTensor());
    } else if (name == "model" || name == "state_dict" || name == "model_state_dict") {
      return add_dictionary(source, item.value(), path);
    }
  }
}

std::unique_ptr<WeightsSource> open_torch_file(const std::string& path) {
  auto source = std::make_unique<TensorSource>();
  std::string first, second;
  try {  // TorchScript, and what torch::save wrote of a C++ module: both are script archives
    const auto module = torch::jit::load(path, c10::kCPU);
    for (const auto& parameter : module.named_parameters()) source->add(parameter.name, parameter.value);
    for (const auto& buffer : module.named_buffers()) source->add(buffer.name, buffer.value);
    return source;
  } catch (const std::exception& error) {
    first = comm::text_of(error);
  }
  try {
    const File file = open_regular(path);
    std::vector<char> bytes(static_cast<size_t>(file.size()));
    file.read(bytes.data(), static_cast<int64_t>(bytes.size()), 0);
    add_dictionary(*source, torch::jit::pickle_load(bytes), path);
    return source;
  } catch (const std::exception& error) {
    second = comm::text_of(error);
  }
  const auto line = [](const std::string& text) { return text.substr(0, std::min(text.find('\n'), size_t{160})); };
  throw FormatError("libtorch can not read '" + path + "' (as a module: " + line(first) +
                    "; as a dictionary: " + line(second) + "). Convert it in Python: state = torch.load('" + path +
                    "', map_location='cpu'); safetensors.torch.save_file({k: v.contiguous() for k, v in "
                    "state.items()}, 'model.safetensors')");
}

}  // namespace

std::unique_ptr<WeightsSource> open_weights(const std::string& path, const std::string& entry) {
  namespace fs = std::filesystem;
  if (fs::is_directory(path) || fs::path(path).extension() == ".safetensors")
    return std::make_unique<ArchiveSource>(path, entry);
  if (!fs::exists(path)) throw FormatError("'" + path + "' does not exist");
  return open_torch_file(path);
}

}  // namespace trueshard::checkpoint
