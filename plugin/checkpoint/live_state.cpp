// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/live_state.h"

#include <c10/util/Exception.h>

#include "plugin/comm/backend.h"

namespace trueshard::checkpoint {

namespace {

struct DtypePair {
  c10::ScalarType torch;
  Dtype stored;
};
constexpr DtypePair kDtypes[] = {
    {c10::kBool, Dtype::kBool},
    {c10::kByte, Dtype::kU8},
    {c10::kChar, Dtype::kI8},
    {c10::kFloat8_e4m3fn, Dtype::kF8E4M3},
    {c10::kFloat8_e5m2, Dtype::kF8E5M2},
    {c10::kShort, Dtype::kI16},
    {c10::kUInt16, Dtype::kU16},
    {c10::kHalf, Dtype::kF16},
    {c10::kBFloat16, Dtype::kBF16},
    {c10::kInt, Dtype::kI32},
    {c10::kUInt32, Dtype::kU32},
    {c10::kFloat, Dtype::kF32},
    {c10::kLong, Dtype::kI64},
    {c10::kUInt64, Dtype::kU64},
    {c10::kDouble, Dtype::kF64},
    {c10::kComplexFloat, Dtype::kC64},
};

bool is_row_major(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

bool has_weights(const Target& target) {
  return target.kind == EntryKind::kOptimizer || target.kind == EntryKind::kModule;
}

}  // namespace

Dtype dtype_of(c10::ScalarType dtype) {
  for (const auto& pair : kDtypes) {
    if (pair.torch == dtype) return pair.stored;
  }
  TORCH_CHECK(false, c10::toString(dtype), " tensors can not be stored in a safetensors file");
}
c10::ScalarType scalar_type_of(Dtype dtype) {
  for (const auto& pair : kDtypes) {
    if (pair.stored == dtype) return pair.torch;
  }
  return c10::ScalarType::Undefined;
}

std::shared_ptr<comm::Transport> transport_of(const std::vector<Target>& targets) {
  const Target* first = nullptr;
  std::shared_ptr<comm::Transport> transport;
  for (const auto& target : targets) {
    if (!target.session) continue;
    auto theirs = comm::transport_of(*target.session->group());
    TORCH_CHECK(!transport || transport == theirs, "trueshard CheckpointState: '", first->key, "' and '", target.key,
                "' are sharded over different process groups; save each group's state in a checkpoint of its own");
    first = &target;
    transport = std::move(theirs);
  }
  return transport;
}

c10::ScalarType stored_dtype(const engine::Parameter& parameter) {
  return parameter.low_precision_master ? parameter.compute_dtype : parameter.master_dtype;
}

ShardView shard_view(const optim::Session& session, int64_t p) {
  const auto& model = const_cast<optim::Session&>(session).model();
  const auto& parameter = model.parameters()[static_cast<size_t>(p)];
  ShardView view{parameter.sizes, parameter.strides, model.owned(p, model.rank()), model.piece(p, model.rank()), true};
  if (view.owned.empty()) view.owned = {0, 0};
  if (view.piece.empty()) view.piece = {0, 0};
  view.row_major = is_row_major(parameter.sizes, parameter.strides);
  return view;
}

FileNames file_names(const std::vector<Target>& targets, const Target& target) {
  int count = 0;
  for (const auto& each : targets) count += has_weights(each);
  const std::string prefix = count > 1 ? target.key + "." : "";
  return {prefix + "model.safetensors", prefix + "optimizer.safetensors"};
}

std::string state_name(const std::string& parameter, const std::string& field) {
  return "state." + parameter + "." + field;
}
std::string rank_name(int rank, const std::string& what) { return "rank." + std::to_string(rank) + "." + what; }

StoredOptimizer describe_optimizer(optim::Session& session) {
  StoredOptimizer stored;
  stored.type = session.optimizer_type();
  const auto counts = session.step_counts();
  stored.steps = counts.steps;
  stored.skipped_steps = counts.skipped_steps;
  stored.stage = static_cast<int64_t>(session.options().stage());
  stored.bucket_bytes = session.options().bucket_bytes();
  if (const auto dtype = session.options().mp_policy().param_dtype()) stored.param_dtype = name_of(dtype_of(*dtype));
  for (size_t g = 0; g < session.members().size(); ++g) {
    StoredGroup group;
    for (const auto& field : optim::option_fields(session.group_options(static_cast<int64_t>(g))))
      group.options.push_back({field.name, field.value, field.is_flag});
    for (const int64_t p : session.members()[g])
      group.parameters.push_back(session.model().parameters()[static_cast<size_t>(p)].name);
    stored.groups.push_back(std::move(group));
  }
  return stored;
}

}  // namespace trueshard::checkpoint
