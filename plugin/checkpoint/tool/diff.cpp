// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iostream>

#include "kernels/kernels.h"
#include "plugin/checkpoint/archive.h"
#include "plugin/checkpoint/manifest_json.h"
#include "plugin/checkpoint/tool/commands.h"

namespace trueshard::checkpoint::tool {

namespace {

constexpr int64_t kChunk = int64_t{1} << 20;

// A number whose order is that of the floating-point values, so that differences count steps between neighbours.
template <typename Bits>
int64_t ordered(Bits bits) {
  using Signed = std::make_signed_t<Bits>;
  const auto value = static_cast<Signed>(bits);
  return value >= 0 ? value : std::numeric_limits<Signed>::min() - static_cast<int64_t>(value);
}
template <typename Bits>
uint64_t distance(const std::byte* a, const std::byte* b) {
  Bits x, y;
  std::memcpy(&x, a, sizeof x);
  std::memcpy(&y, b, sizeof y);
  const int64_t p = ordered(x), q = ordered(y);
  return p > q ? static_cast<uint64_t>(p) - static_cast<uint64_t>(q)
               : static_cast<uint64_t>(q) - static_cast<uint64_t>(p);
}
// Steps between neighbouring values of the dtype; for integers and flags the plain difference.
uint64_t steps_between(Dtype dtype, const std::byte* a, const std::byte* b) {
  switch (itemsize(dtype)) {
    case 1:
      return distance<uint8_t>(a, b);
    case 2:
      return distance<uint16_t>(a, b);
    case 4:
      return distance<uint32_t>(a, b);
    default:
      return distance<uint64_t>(a, b);
  }
}

double value_of(Dtype dtype, const std::byte* data) {
  const auto widen = [&](kernels::DType from) {
    double value = 0;
    kernels::kernels().cast(data, from, &value, kernels::DType::kFloat64, 1);
    return value;
  };
  int64_t integer = 0;
  switch (dtype) {
    case Dtype::kF32:
      return widen(kernels::DType::kFloat32);
    case Dtype::kF64:
      return widen(kernels::DType::kFloat64);
    case Dtype::kBF16:
      return widen(kernels::DType::kBFloat16);
    case Dtype::kF16:
      return widen(kernels::DType::kFloat16);
    default:
      std::memcpy(&integer, data, static_cast<size_t>(std::min<int64_t>(itemsize(dtype), 8)));
      return static_cast<double>(integer);
  }
}

struct Difference {
  int64_t elements = 0, first = -1;
  double a = 0, b = 0;
  uint64_t most_steps = 0;
};

Difference compare(Archive& one, const ArchivedTensor& a, Archive& two, const ArchivedTensor& b) {
  std::vector<std::byte> left;
  Difference result;
  const int64_t item = itemsize(a.dtype);
  // Chunk by chunk: the second archive is read from inside the first one's loop, piece by piece at the same offset.
  int64_t at = 0;
  one.read(a, a.pieces[0], kChunk, [&](const std::byte* data, int64_t bytes) {
    ArchivedPiece piece = b.pieces[0];
    piece.offset += at;
    piece.shape = {bytes / item};
    two.read(b, piece, kChunk, [&](const std::byte* other, int64_t) {
      if (std::memcmp(data, other, static_cast<size_t>(bytes)) == 0) return;
      for (int64_t i = 0; i < bytes; i += item) {
        if (std::memcmp(data + i, other + i, static_cast<size_t>(item)) == 0) continue;
        if (result.first < 0) {
          result.first = (at + i) / item;
          result.a = value_of(a.dtype, data + i);
          result.b = value_of(a.dtype, other + i);
        }
        ++result.elements;
        result.most_steps = std::max(result.most_steps, steps_between(a.dtype, data + i, other + i));
      }
    });
    at += bytes;
  });
  return result;
}

std::string place_of(int64_t element, const std::vector<int64_t>& shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return describe_shape(index);
}

struct Report {
  Json tensors = Json::array(), others = Json::array();
  int64_t differing = 0, shown = 0, limit = 0;
  bool json = false;

  void other(const std::string& text) {
    others.push_back(text);
    if (!json) std::cout << text << '\n';
  }
  void tensor(const ArchivedTensor& a, const Difference& d) {
    ++differing;
    if (shown++ >= limit) return;
    tensors.push_back({{"name", a.name},
                       {"elements", d.elements},
                       {"of", a.bytes() / itemsize(a.dtype)},
                       {"first", d.first},
                       {"a", number_json(d.a)},
                       {"b", number_json(d.b)},
                       {"most_ulps", d.most_steps}});
    if (json) return;
    std::cout.precision(std::numeric_limits<double>::max_digits10);
    std::cout << "'" << a.name << "': " << d.elements << " of " << a.bytes() / itemsize(a.dtype)
              << " elements differ, at most by " << d.most_steps << " ULP; first " << place_of(d.first, a.shape) << ": "
              << d.a << " and " << d.b << '\n';
  }
};

void compare_manifests(const Manifest& a, const Manifest& b, Report& report) {
  for (const auto& entry : a.entries) {
    const auto* other = b.entry(entry.key);
    if (!other) {
      report.other("entry '" + entry.key + "' is in the first only");
    } else if (describe(entry) != describe(*other)) {
      report.other("entry " + describe(entry) + "\n  in the second " + describe(*other));
    }
  }
  for (const auto& entry : b.entries) {
    if (!a.entry(entry.key)) report.other("entry '" + entry.key + "' is in the second only");
  }
}

void compare_tensors(Archive& a, Archive& b, Report& report, Progress& progress) {
  const bool owned = a.manifest() && b.manifest();
  const auto find = [&](Archive& in, const ArchivedTensor& tensor) {
    if (owned || !in.manifest()) return in.find(owned ? tensor.owner : "", tensor.name);
    for (const auto& each : in.tensors()) {  // a checkpoint against plain files: the first of the name
      if (each.name == tensor.name) return &each;
    }
    return static_cast<const ArchivedTensor*>(nullptr);
  };
  for (const auto& tensor : a.tensors()) {
    progress.advance(tensor.bytes());
    const auto* other = find(b, tensor);
    if (!other) {
      report.other("tensor '" + tensor.name + "' is in the first only");
    } else if (other->dtype != tensor.dtype || other->shape != tensor.shape) {
      report.other("tensor '" + tensor.name + "' is " + name_of(tensor.dtype) + " " + describe_shape(tensor.shape) +
                   " and " + name_of(other->dtype) + " " + describe_shape(other->shape));
    } else if (tensor.pieces.size() > 1 || other->pieces.size() > 1) {
      throw FormatError("tensor '" + tensor.name + "' is stored in pieces; diff compares whole tensors only");
    } else {
      const auto difference = compare(a, tensor, b, *other);
      if (difference.elements > 0) report.tensor(tensor, difference);
    }
  }
  for (const auto& tensor : b.tensors()) {
    if (!find(a, tensor)) report.other("tensor '" + tensor.name + "' is in the second only");
  }
}

}  // namespace

int diff(const DiffRequest& request, const Output& output) {
  Archive a(request.a), b(request.b);
  Report report;
  report.json = output.json;
  report.limit = request.most_shown;
  if (a.manifest() && b.manifest()) compare_manifests(*a.manifest(), *b.manifest(), report);
  {
    int64_t bytes = 0;
    for (const auto& tensor : a.tensors()) bytes += tensor.bytes();
    Progress progress("comparing", bytes, output.progress);
    compare_tensors(a, b, report, progress);
  }
  const bool same = report.differing == 0 && report.others.empty();
  if (output.json) {
    std::cout << Json{{"ok", true},
                      {"same", same},
                      {"differing_tensors", report.differing},
                      {"tensors", report.tensors},
                      {"others", report.others}}
                     .dump()
              << std::endl;
  } else if (same) {
    std::cout << "the same, to the bit\n";
  } else if (report.differing > report.shown || report.differing > request.most_shown) {
    std::cout << report.differing << " tensors differ; --limit shows more\n";
  }
  return same ? 0 : 1;
}

}  // namespace trueshard::checkpoint::tool
