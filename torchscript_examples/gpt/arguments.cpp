// SPDX-License-Identifier: BSD-3-Clause
#include "torchscript_examples/gpt/arguments.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <stdexcept>
#include <vector>

namespace gpt {
namespace {

using Setter = std::function<void(const std::string& name, const std::string& value)>;

[[noreturn]] void refuse(const std::string& name, const std::string& got, const std::string& expected) {
  throw std::invalid_argument("gpt_train: --" + name + " is '" + got + "'; expected " + expected);
}

template <typename Number>
Setter number(Number& target, Number least) {
  return [&target, least](const std::string& name, const std::string& text) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least) {
      refuse(name, text, "a number of at least " + std::to_string(least));
    }
    target = value;
  };
}

Setter choice(std::string& target, std::vector<std::string> allowed) {
  return [&target, allowed = std::move(allowed)](const std::string& name, const std::string& text) {
    if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
      std::string expected;
      for (const auto& word : allowed) expected += (expected.empty() ? "" : " or ") + word;
      refuse(name, text, expected);
    }
    target = text;
  };
}

Setter on_or_off(Switch& target) {
  return [&target](const std::string& name, const std::string& text) {
    if (text != "on" && text != "off") refuse(name, text, "on or off");
    target = text == "on" ? Switch::kOn : Switch::kOff;
  };
}

Setter any(std::string& target) {
  return [&target](const std::string&, const std::string& text) { target = text; };
}

std::map<std::string, Setter> setters(Arguments& into) {
  constexpr int64_t kOne = 1, kZero = 0;
  return {{"stage", choice(into.stage, {"replicated", "zero1", "zero2", "zero3"})},
          {"dtype", choice(into.dtype, {"bf16", "fp32"})},
          {"overlap", on_or_off(into.overlap)},
          {"bucket-bytes", number(into.bucket_bytes, kOne)},
          {"passes", number(into.passes, kOne)},
          {"steps", number(into.steps, kOne)},
          {"batch", number(into.batch, kOne)},
          {"context", number(into.context, kOne)},
          {"width", number(into.width, kOne)},
          {"heads", number(into.heads, kOne)},
          {"layers", number(into.layers, kOne)},
          {"tied", on_or_off(into.tied)},
          {"lr", number(into.lr, 0.0)},
          {"warmup", number(into.warmup, kZero)},
          {"max-norm", number(into.max_norm, 0.0)},
          {"init-scale", number(into.init_scale, 1.0)},
          {"growth-interval", number(into.growth_interval, kOne)},
          {"report-every", number(into.report_every, kOne)},
          {"validate-every", number(into.validate_every, kZero)},
          {"sample", number(into.sample, kZero)},
          {"seed", number(into.seed, uint64_t{0})},
          {"script", any(into.script)},
          {"corpus", any(into.corpus)},
          {"corpus-bytes", number(into.corpus_bytes, kOne)},
          {"log", any(into.log)}};
}

}  // namespace

Arguments parse_arguments(int argc, const char* const* argv) {
  Arguments arguments;
  const auto known = setters(arguments);
  for (int i = 1; i < argc; i += 2) {
    const std::string word = argv[i];
    const auto found = word.rfind("--", 0) == 0 ? known.find(word.substr(2)) : known.end();
    if (found == known.end()) throw std::invalid_argument("gpt_train: '" + word + "' is no option\n" + usage());
    if (i + 1 == argc) throw std::invalid_argument("gpt_train: " + word + " needs a value\n" + usage());
    found->second(found->first, argv[i + 1]);
  }
  if (arguments.corpus.empty()) throw std::invalid_argument("gpt_train: --corpus DIR is missing\n" + usage());
  return arguments;
}

std::string usage() {
  Arguments defaults;
  std::string text = "usage: gpt_train --corpus DIR [--OPTION VALUE]...   one process per rank; options:";
  for (const auto& [name, setter] : setters(defaults)) text += " " + name;
  return text;
}

}  // namespace gpt
