// SPDX-License-Identifier: BSD-3-Clause
// Role: one number per parameter (sum of squares, of |x|, of powers, or the maximum) of the reduced gradients, the same
// bits on every rank. Each rank sends the roots of the subtrees it owns and the raw elements of cut blocks
// (plan/norm_plan.h); all finish the same trees. Invariants: I1 what finish_reduction() recorded is used when nobody
// wrote to a gradient since, on any rank; else all read the
//             gradients again. I2 absent gradients contribute nothing.
// Threads: one at a time; collective. Errors: communication only.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "plugin/engine/reducer.h"

namespace trueshard::engine {

struct NormQuery {
  kernels::NormKind kind = kernels::NormKind::kSquare;
  double power = 0;
  double scale = 1.0;         // elements are multiplied by it first (see kernels.h)
  bool allow_record = false;  // squares recorded by finish_reduction() will do
};
struct NormValues {
  std::vector<double> values;  // per parameter, 0.0 where absent
  bool from_record = false;    // of the gradients as they were when the reduction finished
};

class NormExchange {
 public:
  // `before_reading` runs before the gradients themselves are read.
  NormExchange(std::shared_ptr<ShardedModel> model, Reducer& reducer, std::function<void()> before_reading);
  NormValues query(const NormQuery& query);
  static plan::NormPlan::Combine combine_of(kernels::NormKind kind);

 private:
  void fill(const NormQuery& query, bool use_record);
  void fill_from_gradients(const NormQuery& query, double* message);

  std::shared_ptr<ShardedModel> model_;
  Reducer& reducer_;
  std::function<void()> before_reading_;
  std::shared_ptr<comm::Region> region_;  // [0]: 1 when read from the gradients, then the message
  uint64_t last_ = 0;
};

}  // namespace trueshard::engine
