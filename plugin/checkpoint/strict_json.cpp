// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/strict_json.h"

#include <cmath>
#include <limits>

namespace trueshard::checkpoint {

namespace {

// Builds the value and refuses what the format does not allow, while the text is read.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(int max_depth, const std::string& where) : max_depth_(max_depth), where_(where) {}
  Json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (stack_.back()->contains(name)) throw FormatError(where_ + ": the name '" + name + "' appears twice");
    name_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw FormatError(where_ + ": not JSON, at byte " + std::to_string(position));
  }

 private:
  Json* put(Json value, int) {
    if (stack_.empty()) return &(root_ = std::move(value));
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[name_] = std::move(value));
  }
  bool put(Json value) {
    put(std::move(value), 0);
    return true;
  }
  bool open(Json value) {
    if (static_cast<int>(stack_.size()) >= max_depth_)
      throw FormatError(where_ + ": nested more than " + std::to_string(max_depth_) + " deep");
    stack_.push_back(put(std::move(value), 0));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  int max_depth_;
  const std::string& where_;
  Json root_;
  std::vector<Json*> stack_;
  std::string name_;
};

}  // namespace

Json parse_json(std::string_view text, int max_depth, const std::string& where) {
  Builder builder(max_depth, where);
  try {
    if (!Json::sax_parse(text.begin(), text.end(), &builder)) throw FormatError(where + ": not JSON");
  } catch (const nlohmann::json::exception& error) {
    throw FormatError(where + ": not JSON (" + error.what() + ")");
  }
  return builder.take();
}

void Field::refuse(const std::string& expected) const {
  std::string found = value_->dump(-1, ' ', false, Json::error_handler_t::replace);
  if (found.size() > 60) found = found.substr(0, 60) + "...";
  throw FormatError(path_ + " is " + found + "; expected " + expected);
}
const Json& Field::object() const {
  if (!value_->is_object()) refuse("an object");
  return *value_;
}
const Json& Field::array() const {
  if (!value_->is_array()) refuse("an array");
  return *value_;
}
bool Field::has(const char* name) const { return object().contains(name); }
Field Field::operator[](const char* name) const {
  const auto found = object().find(name);
  if (found == object().end()) throw FormatError(path_ + " has no '" + name + "'");
  return Field(*found, path_ + "." + name);
}
std::string Field::text() const {
  if (!value_->is_string()) refuse("a text");
  return value_->get<std::string>();
}
int64_t Field::integer(int64_t lowest) const {
  const bool fits = value_->is_number_unsigned()
                        ? value_->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
                        : value_->is_number_integer();
  if (!fits || value_->get<int64_t>() < lowest) refuse("an integer of at least " + std::to_string(lowest));
  return value_->get<int64_t>();
}
bool Field::flag() const {
  if (!value_->is_boolean()) refuse("true or false");
  return value_->get<bool>();
}
double Field::number() const {
  if (value_->is_number()) return value_->get<double>();
  const std::string word = value_->is_string() ? value_->get<std::string>() : "";
  if (word == "inf") return std::numeric_limits<double>::infinity();
  if (word == "-inf") return -std::numeric_limits<double>::infinity();
  if (word != "nan") refuse("a number");
  return std::numeric_limits<double>::quiet_NaN();
}
std::vector<int64_t> Field::shape() const {
  constexpr size_t kMostDimensions = 64;
  if (array().size() > kMostDimensions) refuse("at most 64 dimensions");
  std::vector<int64_t> shape;
  for (const Json& extent : *value_) shape.push_back(Field(extent, path_).integer(0));
  return shape;
}
std::vector<std::string> Field::texts() const {
  std::vector<std::string> texts;
  for (const Json& each : array()) texts.push_back(Field(each, path_).text());
  return texts;
}

Json number_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

}  // namespace trueshard::checkpoint
