// SPDX-License-Identifier: BSD-3-Clause
// Input: a manifest without its checksum, which is put on here: else no change would ever get past it. What is accepted
// must name files inside the folder only, and be written and read back the same.
#include <cstdlib>
#include <string>

#include "plugin/checkpoint/crc32c.h"
#include "plugin/checkpoint/manifest.h"

using namespace trueshard::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  char seal[32];
  std::snprintf(seal, sizeof seal, ",\n\"crc32c\":\"%08x\"}\n", crc32c(text.data(), text.size()));
  text += seal;
  try {
    const auto manifest = parse_manifest(text, "input");
    for (const auto& file : manifest.files) require_plain_name(file.name, "accepted");
    for (const auto& entry : manifest.entries) {
      if (entry.kind == EntryKind::kOptimizer && (!manifest.file(entry.file) || !manifest.file(entry.state_file)))
        std::abort();
    }
    const auto written = to_text(manifest);
    if (to_text(parse_manifest(written, "written")) != written) std::abort();
  } catch (const FormatError&) {
  }
  return 0;
}
