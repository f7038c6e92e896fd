// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/weights.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <map>

#include "plugin/checkpoint/matching.h"
#include "plugin/checkpoint/weights_source.h"

namespace trueshard::checkpoint {

namespace {

constexpr const char* kLoadWeights = "load_weights";

// Every value of `from` is one of `to`.
bool widens(c10::ScalarType from, c10::ScalarType to) {
  if (from == to) return true;
  if (to == c10::kFloat) return from == c10::kBFloat16 || from == c10::kHalf;
  return to == c10::kDouble && (from == c10::kFloat || from == c10::kBFloat16 || from == c10::kHalf);
}

class WeightsLoad {
 public:
  WeightsLoad(const LoadRequest& request, WeightsSource& source) : request_(request), source_(source) {
    for (const auto& named : source.names()) left_[named.name] = &named;
    const auto& target = request.targets[0];
    if (target.session) {
      match_sharded(*target.session);
    } else {
      const auto module = target.module();
      for (const auto& parameter : module.parameters) match_whole(parameter);
      for (const auto& buffer : module.buffers) match_whole(buffer);
    }
    for (const auto& [name, named] : left_) {
      if (!is_listed(request_.allow_unexpected, name)) problems_ += " '" + name + "' is not in the program;";
    }
    if (!problems_.empty())
      throw FormatError("'" + request.folder + "' and the program do not fit:" + problems_ +
                        " nothing was loaded. Names given to LoadOptions().allow_missing() and allow_unexpected() are "
                        "let pass");
    for (const auto& read : reads_) read();
  }
  void apply() {
    for (const auto& action : actions_) action();
  }

 private:
  const WeightsSource::Named* take(const std::vector<std::string>& names, c10::ScalarType dtype,
                                   at::IntArrayRef sizes) {
    const WeightsSource::Named* found = nullptr;
    for (const auto& name : names) {  // a tied tensor may be there under each of its names, with one value
      const auto at = left_.find(name);
      if (at == left_.end()) continue;
      if (!found) found = at->second;
      left_.erase(at);
    }
    if (!found) {
      if (!is_listed(request_.allow_missing, names[0])) problems_ += " '" + names[0] + "' is missing in the file;";
      return nullptr;
    }
    if (sizes == found->shape && widens(found->dtype, dtype)) return found;
    problems_ += " '" + found->name + "' is " + c10::toString(found->dtype) + " " + describe_shape(found->shape) +
                 " in the file, " + c10::toString(dtype) + " " + describe_shape(sizes.vec()) + " in the program;";
    return nullptr;
  }

  static std::vector<std::string> names_of(const std::string& name, const std::vector<std::string>& others) {
    std::vector<std::string> names{name};
    names.insert(names.end(), others.begin(), others.end());
    return names;
  }

  void match_whole(const engine::NamedTensor& named) {
    const auto* found = take(names_of(named.name, named.other_names), named.tensor.scalar_type(), named.tensor.sizes());
    if (!found) return;
    auto value = std::make_shared<at::Tensor>();
    reads_.push_back([this, found, value] {
      *value = source_.read(found->name, 0, c10::multiply_integers(found->shape)).view(found->shape);
    });
    actions_.push_back([to = named.tensor, value] {
      const at::NoGradGuard no_grad;
      to.detach().copy_(*value);
    });
  }

  void match_sharded(optim::Session& session) {
    auto& model = session.model();
    for (int64_t p = 0; p < model.size(); ++p) {
      const auto& parameter = model.parameters()[static_cast<size_t>(p)];
      const auto names = names_of(parameter.name, parameter.other_names);
      if (!model.manages(p)) {  // another optimizer's: it may be there
        for (const auto& name : names) left_.erase(name);
        continue;
      }
      const auto dtype = stored_dtype(parameter);
      const auto* found = take(names, dtype, parameter.sizes);
      if (!found) continue;
      auto value = std::make_shared<at::Tensor>();
      reads_.push_back([this, found, value, dtype, view = shard_view(session, p)] {
        if (view.row_major) {
          *value = source_.read(found->name, view.owned.begin, view.owned.end).to(dtype);
          return;
        }
        auto whole = at::empty_strided(view.sizes, view.strides, at::TensorOptions().dtype(dtype));
        whole.copy_(source_.read(found->name, 0, whole.numel()).view(view.sizes));
        *value = whole.as_strided({whole.numel()}, {1}).slice(0, view.owned.begin, view.owned.end).clone();
      });
      actions_.push_back([&model, p, value] {
        if (value->numel() > 0) std::memcpy(model.master(p, model.rank()), value->const_data_ptr(), value->nbytes());
      });
    }
    for (const auto& buffer : model.buffers()) match_whole(buffer);
  }

  const LoadRequest& request_;
  WeightsSource& source_;
  std::map<std::string, const WeightsSource::Named*> left_;
  std::vector<std::function<void()>> reads_, actions_;
  std::string problems_;
};

}  // namespace

void load_weights(const LoadRequest& request) {
  auto* session = request.targets[0].session;
  if (session) session->prepare_checkpoint(kLoadWeights);
  Conversation conversation(request.transport, kLoadWeights, 64);
  std::unique_ptr<WeightsSource> source;
  std::unique_ptr<WeightsLoad> load;
  conversation.exchange(error_of([&] {
    source = open_weights(request.folder, request.targets[0].key);
    load = std::make_unique<WeightsLoad>(request, *source);
  }));
  load->apply();
  if (session) session->publish_masters();
}

}  // namespace trueshard::checkpoint
