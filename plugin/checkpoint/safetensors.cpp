// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>

#include "plugin/checkpoint/strict_json.h"

namespace trueshard::checkpoint {

namespace {

constexpr int kHeaderDepth = 3;  // header { tensor { shape [
constexpr const char* kMetadata = "__metadata__";

void require_printable(const std::string& name, const std::string& where) {
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      throw FormatError(where + ": a tensor's name has a control character");
  }
  if (name.empty()) throw FormatError(where + ": a tensor has an empty name");
}

TensorInfo parse_tensor(const std::string& name, const Field& field, int64_t data_bytes) {
  TensorInfo info;
  info.name = name;
  for (const auto& item : field.object().items()) {
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets")
      field.refuse("dtype, shape and data_offsets only");
  }
  const auto dtype = dtype_named(field["dtype"].text());
  if (!dtype) field["dtype"].refuse("a dtype of the safetensors format (F32, BF16, I64, ...)");
  info.dtype = *dtype;
  info.shape = field["shape"].shape();
  const Field offsets = field["data_offsets"];
  if (offsets.array().size() != 2) offsets.refuse("two numbers");
  info.begin = Field(offsets.array()[0], offsets.path()).integer(0);
  info.end = Field(offsets.array()[1], offsets.path()).integer(info.begin);
  if (info.end > data_bytes)
    offsets.refuse("offsets within the file's " + std::to_string(data_bytes) + " bytes of data");
  const auto elements = elements_of(info.shape, itemsize(info.dtype));
  if (!elements) field["shape"].refuse("a shape whose bytes can be counted in 63 bits");
  if (*elements * itemsize(info.dtype) != info.bytes())
    offsets.refuse(std::to_string(*elements * itemsize(info.dtype)) + " bytes, as dtype and shape say");
  return info;
}

void require_gapless(const Header& header, int64_t data_bytes, const std::string& where) {
  int64_t at = 0;
  for (const TensorInfo& tensor : header.tensors) {
    if (tensor.begin != at) {
      throw FormatError(where + ": tensor '" + tensor.name + "' starts at byte " + std::to_string(tensor.begin) +
                        " of the data, expected " + std::to_string(at) +
                        (tensor.begin < at ? " (it overlaps another)" : " (there is a hole)"));
    }
    at = tensor.end;
  }
  if (at != data_bytes)
    throw FormatError(where + ": " + std::to_string(data_bytes - at) + " bytes after the last tensor");
}

}  // namespace

const TensorInfo* Header::find(std::string_view name) const {
  for (const TensorInfo& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

Header parse_header(std::string_view text, int64_t file_bytes, const std::string& where) {
  Header header;
  header.data_offset = 8 + static_cast<int64_t>(text.size());
  header.file_bytes = file_bytes;
  const int64_t data_bytes = file_bytes - header.data_offset;
  if (data_bytes < 0) throw FormatError(where + ": the header does not fit in the file");
  if (text.empty() || text[0] != '{') throw FormatError(where + ": the header does not start with '{'");
  const std::string label = where + ": header";
  const Json json = parse_json(text, kHeaderDepth, label);
  for (const auto& item : json.items()) {
    if (item.key() == kMetadata) {
      const Field metadata(item.value(), label + " " + kMetadata);
      for (const auto& pair : metadata.object().items())
        header.metadata[pair.key()] = Field(pair.value(), metadata.path()).text();
      continue;
    }
    require_printable(item.key(), label);
    header.tensors.push_back(
        parse_tensor(item.key(), Field(item.value(), where + ": tensor '" + item.key() + "'"), data_bytes));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end != b.end ? a.end < b.end : a.name < b.name;
  });
  require_gapless(header, data_bytes, where);
  return header;
}

Header read_header(const File& file, std::string* bytes) {
  const std::string where = "'" + file.path() + "'";
  const int64_t size = file.size();
  if (size < 8) throw FormatError(where + " has " + std::to_string(size) + " bytes; a safetensors file has 8 at least");
  uint64_t length = 0;
  file.read(&length, 8, 0);
  if (length > static_cast<uint64_t>(std::min(kMostHeaderBytes, size - 8))) {
    throw FormatError(where + ": the header says it is " + std::to_string(length) + " bytes long; expected at most " +
                      std::to_string(std::min(kMostHeaderBytes, size - 8)) + "; not a safetensors file, or truncated");
  }
  std::string text(length + 8, '\0');
  file.read(text.data(), static_cast<int64_t>(length) + 8, 0);
  Header header = parse_header(std::string_view(text).substr(8), size, where);
  if (bytes) *bytes = std::move(text);
  return header;
}
Header read_header(const File& file) { return read_header(file, nullptr); }

PlannedFile plan_file(std::vector<TensorInfo> tensors, std::map<std::string, std::string> metadata) {
  // Larger elements first: every tensor then starts on a multiple of its element.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) { return itemsize(a.dtype) > itemsize(b.dtype); });
  int64_t at = 0;
  Json json = Json::object();
  if (!metadata.empty()) json[kMetadata] = metadata;
  for (TensorInfo& tensor : tensors) {
    const auto elements = elements_of(tensor.shape, itemsize(tensor.dtype));
    if (!elements) throw FormatError("tensor '" + tensor.name + "' is too large: " + describe_shape(tensor.shape));
    tensor.begin = at;
    at = tensor.end = at + *elements * itemsize(tensor.dtype);
    if (tensor.name == kMetadata || json.contains(tensor.name))
      throw FormatError("two tensors of one file have the name '" + tensor.name + "'");
    json[tensor.name] = {
        {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  std::string text = json.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data starts on 8 bytes
  if (static_cast<int64_t>(text.size()) > kMostHeaderBytes)
    throw FormatError("a file of " + std::to_string(tensors.size()) + " tensors needs a header beyond 100 MB");
  const uint64_t length = text.size();
  PlannedFile file;
  file.bytes.assign(reinterpret_cast<const char*>(&length), 8);
  file.bytes += text;
  file.header.tensors = std::move(tensors);
  file.header.metadata = std::move(metadata);
  file.header.data_offset = static_cast<int64_t>(file.bytes.size());
  file.header.file_bytes = file.header.data_offset + at;
  return file;
}

}  // namespace trueshard::checkpoint
