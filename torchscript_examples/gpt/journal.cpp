// SPDX-License-Identifier: BSD-3-Clause
#include "torchscript_examples/gpt/journal.h"

#include <malloc.h>

#include <cmath>
#include <fstream>
#include <iomanip>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace gpt {
namespace {

// Writes `"key": value` pairs; NaN and infinity become strings, which JSON has no numbers for.
class Object {
 public:
  explicit Object(std::ostream& out) : out_(out) { out_ << "{"; }
  ~Object() { out_ << "}"; }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  std::ostream& key(const char* name) {
    out_ << (first_ ? "" : ", ") << '"' << name << "\": ";
    first_ = false;
    return out_;
  }
  void number(const char* name, double value) {
    if (std::isfinite(value)) {
      key(name) << value;
    } else {
      key(name) << '"' << value << '"';
    }
  }
  void integer(const char* name, int64_t value) { key(name) << value; }
  void text(const char* name, const std::string& value) { key(name) << '"' << value << '"'; }  // words only, no escapes

 private:
  std::ostream& out_;
  bool first_ = true;
};

void write_step(std::ostream& out, const StepRecord& step) {
  Object object(out);
  object.integer("step", step.step);
  object.number("loss", step.loss);
  object.number("norm", step.norm);
  object.number("scale", step.scale);
  object.number("lr", step.lr);
  object.number("seconds", step.seconds);
  object.number("communicating", step.communicating);
}

void write_memory(std::ostream& out, const MemoryRecord& memory) {
  Object object(out);
  object.integer("ledger", memory.ledger);
  object.integer("formula", memory.formula);
  object.integer("formula_padded", memory.formula_padded);
  object.integer("process", memory.process);
}

void write_all(std::ostream& out, const Journal& journal) {
  Object object(out);
  object.integer("rank", journal.rank);
  object.integer("world", journal.world);
  object.integer("threads", journal.threads);
  object.integer("passes", journal.passes);
  object.integer("parameters", journal.parameters);
  object.integer("corpus_bytes", journal.corpus_bytes);
  object.integer("corpus_files", journal.corpus_files);
  object.integer("tokens_per_step", journal.tokens_per_step);
  object.integer("skipped", journal.skipped);
  object.text("stage", journal.stage);
  object.text("dtype", journal.dtype);
  object.text("overlap", journal.overlap);
  object.integer("bucket_bytes", journal.bucket_bytes);
  object.text("digest", journal.digest);
  write_memory(object.key("memory"), journal.memory);
  auto& steps = object.key("steps") << "[";
  for (size_t i = 0; i < journal.steps.size(); ++i) write_step(steps << (i == 0 ? "\n" : ",\n"), journal.steps[i]);
  steps << "]";
  auto& validation = object.key("validation") << "[";
  for (size_t i = 0; i < journal.validation.size(); ++i) {
    Object point(validation << (i == 0 ? "\n" : ",\n"));
    point.integer("step", journal.validation[i].first);
    point.number("loss", journal.validation[i].second);
  }
  validation << "]";
}

}  // namespace

void write_journal(const Journal& journal, const std::string& path) {
  std::ofstream file(path);
  file << std::setprecision(std::numeric_limits<double>::max_digits10);
  write_all(file, journal);
  file << "\n";
  file.close();
  if (!file) throw std::runtime_error("gpt: cannot write '" + path + "'");
}

int64_t resident_bytes() {
  malloc_trim(0);
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  int64_t anonymous = 0, shared = 0, all = 0;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    int64_t kib = 0;
    words >> name >> kib;
    if (name == "Pss:") all = kib;
    if (name == "Pss_Anon:") anonymous = kib;
    if (name == "Pss_Shmem:") shared = kib;
  }
  return 1024 * (anonymous + shared > 0 ? anonymous + shared : all);
}

}  // namespace gpt
