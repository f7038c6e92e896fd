// SPDX-License-Identifier: BSD-3-Clause
// Role: the parts of manifest.json as JSON and back. Private to the manifest.
// Threads: pure functions. Errors: FormatError naming the member.
#pragma once
#include "plugin/checkpoint/manifest.h"
#include "plugin/checkpoint/strict_json.h"

namespace trueshard::checkpoint {

std::string hex32(uint32_t value);
bool has_file(EntryKind kind);
EntryKind kind_named(const Field& field);
Json entry_to_json(const StoredEntry& entry);
Json entries_to_json(const Manifest& manifest);
Json files_to_json(const Manifest& manifest);
void entries_from_json(const Field& field, Manifest& manifest);
void files_from_json(const Field& field, Manifest& manifest);

}  // namespace trueshard::checkpoint
