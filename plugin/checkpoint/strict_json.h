// SPDX-License-Identifier: BSD-3-Clause
// Role: JSON from files that may be damaged or hostile, into nlohmann::json, and checked access to it.
// Invariants: I1 duplicate names, more nesting than allowed and anything after the value are refused. I2 nothing
// recurses over the text. Threads: pure functions. Errors: FormatError with `where` and the place.
#pragma once
#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

#include "plugin/checkpoint/dtype.h"

namespace trueshard::checkpoint {

using Json = nlohmann::json;

Json parse_json(std::string_view text, int max_depth, const std::string& where);

// A value of an object, with the path to it for the error text.
class Field {
 public:
  Field(const Json& value, std::string path) : value_(&value), path_(std::move(path)) {}
  Field operator[](const char* name) const;  // required
  bool has(const char* name) const;
  const Json& object() const;
  const Json& array() const;
  std::string text() const;
  int64_t integer(int64_t lowest) const;
  bool flag() const;
  double number() const;  // also "inf", "-inf" and "nan", as number_json writes them
  std::vector<int64_t> shape() const;
  std::vector<std::string> texts() const;
  const std::string& path() const { return path_; }
  [[noreturn]] void refuse(const std::string& expected) const;

 private:
  const Json* value_;
  std::string path_;
};
Json number_json(double value);

}  // namespace trueshard::checkpoint
