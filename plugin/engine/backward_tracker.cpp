// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/engine/backward_tracker.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>

namespace trueshard::engine {

namespace {

using torch::autograd::variable_list;

// Runs in the task of an outer backward, right after the node that started an inner one.
struct AfterNode : torch::autograd::FunctionPostHook {
  std::function<void()> action;
  explicit AfterNode(std::function<void()> run) : action(std::move(run)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (action) std::exchange(action, nullptr)();
    return outputs;
  }
};

}  // namespace

std::shared_ptr<BackwardTracker> BackwardTracker::of(const std::shared_ptr<comm::Transport>& transport) {
  static std::mutex mutex;
  static std::map<comm::Transport*, std::weak_ptr<BackwardTracker>> trackers;
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(trackers, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = trackers[transport.get()];
  auto tracker = entry.lock();
  if (!tracker) {
    tracker = std::make_shared<BackwardTracker>();
    tracker->self_ = tracker;
    entry = tracker;
  }
  return tracker;
}

void BackwardTracker::add(BackwardMember* member) { members_.push_back(member); }
void BackwardTracker::remove(BackwardMember* member) {
  std::erase(members_, member);
  std::erase(open_, member);
}

void BackwardTracker::queue_end(std::weak_ptr<BackwardTracker> tracker, std::shared_ptr<int> token) {
  // The graph task owns this callback, hence the token, until it is destroyed.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [tracker = std::move(tracker), token = std::move(token)] {
        if (auto self = tracker.lock()) self->leave_task();
      });
}

void BackwardTracker::open() {
  auto token = std::make_shared<int>(0);
  token_ = token;
  queue_end(self_, std::move(token));
}

bool BackwardTracker::enter(BackwardMember* member) {
  close_abandoned();
  if (open_.empty()) open();
  if (std::find(open_.begin(), open_.end(), member) != open_.end()) return false;
  open_.push_back(member);
  return true;
}

void BackwardTracker::leave_task() {
  if (open_.empty()) return;
  const auto outer = torch::autograd::get_current_node();
  if (!outer) return end();
  // A node of an outer backward is running: this task is nested in it. Go on in the outer one, once that node is done.
  auto token = token_.lock();
  outer->add_post_hook(std::make_unique<AfterNode>([tracker = self_, token] { queue_end(tracker, token); }));
}

void BackwardTracker::end() {
  auto open = std::exchange(open_, {});
  std::exception_ptr first;
  for (auto* member : members_) {
    if (std::find(open.begin(), open.end(), member) == open.end()) continue;
    try {
      member->end_pass();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void BackwardTracker::close_abandoned() {
  if (open_.empty() || !token_.expired()) return;
  for (auto* member : std::exchange(open_, {})) member->abandon_pass();
}

}  // namespace trueshard::engine
