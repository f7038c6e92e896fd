// SPDX-License-Identifier: BSD-3-Clause
// Role: named tensors in a file or folder of any kind that load_weights() knows.
// Threads: one. Errors: FormatError that names the path; for what libtorch can not read, with the lines of Python that
// convert it.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace trueshard::checkpoint {

class WeightsSource {
 public:
  virtual ~WeightsSource() = default;
  struct Named {
    std::string name;
    std::vector<int64_t> shape;
    c10::ScalarType dtype;
  };
  virtual const std::vector<Named>& names() const = 0;
  // Elements [begin, end) in row-major order, as a flat tensor.
  virtual at::Tensor read(const std::string& name, int64_t begin, int64_t end) = 0;
};

std::unique_ptr<WeightsSource> open_weights(const std::string& path, const std::string& entry);

}  // namespace trueshard::checkpoint
