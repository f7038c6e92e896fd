// SPDX-License-Identifier: BSD-3-Clause
// Input: the bytes of a safetensors file. What the reader accepts must be consistent, and planning the same tensors
// anew must be read back.
#include <cstdlib>
#include <string_view>

#include "plugin/checkpoint/safetensors.h"

using namespace trueshard::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;
  try {
    const auto header =
        parse_header({reinterpret_cast<const char*>(data) + 8, (size - 8) / 2}, static_cast<int64_t>(size), "input");
    int64_t bytes = 0;
    for (const auto& tensor : header.tensors) {
      const auto elements = elements_of(tensor.shape, itemsize(tensor.dtype));
      if (!elements || *elements * itemsize(tensor.dtype) != tensor.bytes() || tensor.begin != bytes) std::abort();
      bytes = tensor.end;
    }
    if (header.data_offset + bytes != header.file_bytes) std::abort();
    const auto planned = plan_file(header.tensors, header.metadata);
    const auto again = parse_header(std::string_view(planned.bytes).substr(8), planned.header.file_bytes, "planned");
    if (again.tensors.size() != header.tensors.size() || again.metadata != header.metadata) std::abort();
  } catch (const FormatError&) {
  }
  return 0;
}
