// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/norm_exchange.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "plugin/engine/dtypes.h"
#include "plugin/engine/parallel.h"

namespace trueshard::engine {

namespace {

constexpr int64_t kHeader = 8;  // doubles: one cache line
double add(double a, double b) { return a + b; }
double maximum(double a, double b) { return std::isnan(a) ? a : std::isnan(b) ? b : std::max(a, b); }

}  // namespace

plan::NormPlan::Combine NormExchange::combine_of(kernels::NormKind kind) {
  return kind == kernels::NormKind::kMaximum ? maximum : add;
}

NormExchange::NormExchange(std::shared_ptr<ShardedModel> model, Reducer& reducer, std::function<void()> before_reading)
    : model_(std::move(model)), reducer_(reducer), before_reading_(std::move(before_reading)) {
  const auto doubles = static_cast<size_t>(kHeader + model_->norm_plan().message_doubles(model_->rank()));
  region_ = model_->transport()->allocate(model_->name() + "/norm", doubles * sizeof(double));
}

void NormExchange::fill(const NormQuery& query, bool use_record) {
  auto* buffer = reinterpret_cast<double*>(region_->data(model_->rank()));
  buffer[0] = use_record ? 0.0 : 1.0;
  double* message = buffer + kHeader;
  if (!use_record) return fill_from_gradients(query, message);
  const auto& plan = model_->norm_plan();
  const auto& runs = plan.runs(model_->rank());
  for (size_t i = 0; i < runs.size(); ++i) {
    if (reducer_.has_gradient(runs[i].parameter))
      plan.write_roots(runs[i], reducer_.record().block_squares[i].data(), combine_of(query.kind), message);
  }
  const auto& cuts = plan.cuts(model_->rank());
  for (size_t i = 0; i < cuts.size(); ++i) {
    if (!reducer_.has_gradient(cuts[i].parameter)) continue;
    std::copy(reducer_.record().cut_elements[i].begin(), reducer_.record().cut_elements[i].end(),
              message + cuts[i].message_offset);
  }
}

void NormExchange::fill_from_gradients(const NormQuery& query, double* message) {
  before_reading_();
  const auto& plan = model_->norm_plan();
  const int rank = model_->rank();
  const auto element = [&](int64_t parameter, int64_t index) {  // address of an element of this rank's gradient
    const auto& gradient = reducer_.shard(parameter).grad();
    return static_cast<const std::byte*>(gradient.const_data_ptr()) +
           (index - model_->owned(parameter, rank).begin) * model_->master_itemsize(parameter);
  };
  std::vector<double> blocks;
  for (const auto& run : plan.runs(rank)) {
    if (!reducer_.has_gradient(run.parameter)) continue;
    const auto dtype = kernel_dtype(model_->parameters()[run.parameter].master_dtype);
    blocks.resize(static_cast<size_t>(run.blocks.size()));
    const std::byte* data = element(run.parameter, run.elements.begin);
    for_blocks(run.elements.size(), [&](int64_t begin, int64_t end) {
      kernels::NormCall call{query.kind,  data + begin * kernels::itemsize(dtype), dtype,
                             end - begin, blocks.data() + begin / kernels::kBlock, query.scale,
                             query.power};
      kernels::kernels().norm_blocks(call);
    });
    plan.write_roots(run, blocks.data(), combine_of(query.kind), message);
  }
  for (const auto& cut : plan.cuts(rank)) {
    if (!reducer_.has_gradient(cut.parameter)) continue;
    const auto dtype = kernel_dtype(model_->parameters()[cut.parameter].master_dtype);
    kernels::kernels().cast(element(cut.parameter, cut.elements.begin), dtype, message + cut.message_offset,
                            kernels::DType::kFloat64, cut.elements.size());
  }
}

NormValues NormExchange::query(const NormQuery& query) {
  std::vector<bool> present(static_cast<size_t>(model_->size()));
  bool has_fp64 = false;
  for (int64_t p = 0; p < model_->size(); ++p) {
    present[p] = reducer_.has_gradient(p);
    has_fp64 |= present[p] && model_->parameters()[p].master_dtype == c10::kDouble;
  }
  // A scale is asked for where squares could overflow: what was recorded has none.
  const bool recordable =
      query.allow_record && query.scale == 1.0 && query.kind == kernels::NormKind::kSquare && !has_fp64;
  if (last_ != 0) reducer_.channel().wait_all_read(last_);
  fill(query, recordable && reducer_.record_is_current());
  auto fingerprint = comm::Fingerprint::of("gradient norm");
  fingerprint.detail = static_cast<uint64_t>(query.kind);
  const uint64_t seq = reducer_.meet(fingerprint);
  bool from_record = true;
  std::vector<const double*> messages;
  for (int r = 0; r < model_->world(); ++r) {
    const auto* buffer = reinterpret_cast<const double*>(region_->data(r));
    from_record &= buffer[0] == 0.0;
    messages.push_back(buffer + kHeader);
  }
  last_ = seq;
  if (recordable && !from_record) {  // somebody wrote to a gradient: everybody reads the gradients as they are
    reducer_.done(seq);
    auto again = query;
    again.allow_record = false;
    return this->query(again);
  }
  const auto block_value = [&](const double* elements, int64_t count) {
    double value = 0;
    kernels::NormCall call{query.kind, elements, kernels::DType::kFloat64, count, &value, query.scale, query.power};
    kernels::kernels().norm_blocks(call);
    return value;
  };
  NormValues result{model_->norm_plan().parameter_values(messages, present, combine_of(query.kind), block_value),
                    from_record};
  reducer_.done(seq);
  return result;
}

}  // namespace trueshard::engine
