// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/plan/unit_plan.h"

#include <map>
#include <memory>
#include <set>
#include <stdexcept>

namespace trueshard::plan {
namespace {

struct Node {
  std::string path;
  int64_t bytes = 0;               // of everything below
  std::vector<int64_t> own;        // parameters registered here
  std::vector<std::string> order;  // children in order of first appearance
  std::map<std::string, std::unique_ptr<Node>> children;

  Node& child(const std::string& name) {
    auto& slot = children[name];
    if (!slot) {
      slot = std::make_unique<Node>();
      slot->path = path.empty() ? name : path + "." + name;
      order.push_back(name);
    }
    return *slot;
  }
};

void collect(const Node& node, std::vector<int64_t>& parameters) {
  parameters.insert(parameters.end(), node.own.begin(), node.own.end());
  for (const auto& name : node.order) collect(*node.children.at(name), parameters);
}

class Planner {
 public:
  Planner(const std::vector<UnitSpec>& parameters, const UnitRequest& request)
      : parameters_(parameters), limit_(request.unit_bytes), named_(request.modules.begin(), request.modules.end()) {
    for (size_t i = 0; i < parameters.size(); ++i) insert(static_cast<int64_t>(i));
    for (const auto& module : request.modules) {
      if (paths_.count(module) == 0) {
        throw std::invalid_argument("ShardOptions.units names '" + module +
                                    "', but the module has no submodule of that name with parameters; use a name from "
                                    "named_modules()");
      }
    }
  }

  UnitPlan run() {
    visit(root_, /*owner=*/nullptr);
    plan_.unit_of.assign(parameters_.size(), 0);
    for (size_t u = 0; u < plan_.units.size(); ++u) {
      for (const auto p : plan_.units[u].parameters) plan_.unit_of[static_cast<size_t>(p)] = static_cast<int64_t>(u);
    }
    return std::move(plan_);
  }

 private:
  void insert(int64_t parameter) {
    const auto& spec = parameters_[static_cast<size_t>(parameter)];
    Node* node = &root_;
    paths_.insert("");
    size_t begin = 0;
    node->bytes += spec.bytes;
    for (size_t dot = spec.name.find('.'); dot != std::string::npos; dot = spec.name.find('.', begin)) {
      node = &node->child(spec.name.substr(begin, dot - begin));
      node->bytes += spec.bytes;
      paths_.insert(node->path);
      begin = dot + 1;
    }
    node->own.push_back(parameter);
  }

  bool names_something_in(const Node& node) const {
    for (const auto& name : node.order) {
      const auto& child = *node.children.at(name);
      if (named_.count(child.path) > 0 || names_something_in(child)) return true;
    }
    return false;
  }

  // `owner`: the unit of a named module above; what is not named itself joins it.
  void visit(const Node& node, Unit* owner) {
    Unit named;
    if (named_.count(node.path) > 0) {
      named.module = node.path;
      owner = &named;
    }
    if (owner != nullptr) {
      owner->parameters.insert(owner->parameters.end(), node.own.begin(), node.own.end());
    } else if (node.bytes <= limit_ && !names_something_in(node)) {
      Unit unit{node.path, {}, 0};
      collect(node, unit.parameters);
      return add(std::move(unit));
    } else {
      add_own(node);
    }
    for (const auto& name : node.order) visit(*node.children.at(name), owner);
    if (owner == &named) add(std::move(named));
  }

  void add_own(const Node& node) {
    Unit unit{node.path, {}, 0};
    int64_t bytes = 0;
    for (const auto p : node.own) {
      const int64_t more = parameters_[static_cast<size_t>(p)].bytes;
      if (!unit.parameters.empty() && bytes + more > limit_) {
        add(std::move(unit));
        unit = {node.path, {}, 0};
        bytes = 0;
      }
      unit.parameters.push_back(p);
      bytes += more;
    }
    add(std::move(unit));
  }

  void add(Unit unit) {
    if (unit.parameters.empty()) return;
    for (const auto p : unit.parameters) unit.bytes += parameters_[static_cast<size_t>(p)].bytes;
    plan_.units.push_back(std::move(unit));
  }

  const std::vector<UnitSpec>& parameters_;
  int64_t limit_;
  std::set<std::string> named_, paths_;
  Node root_;
  UnitPlan plan_;
};

}  // namespace

UnitPlan make_unit_plan(const std::vector<UnitSpec>& parameters, const UnitRequest& request) {
  if (request.unit_bytes < 1) {
    throw std::invalid_argument("ShardOptions.unit_bytes is " + std::to_string(request.unit_bytes) +
                                "; expected at least 1");
  }
  return Planner(parameters, request).run();
}

}  // namespace trueshard::plan
