// SPDX-License-Identifier: BSD-3-Clause
// Role: how a module is sharded. Set once, validated once by shard(); must be the same on all ranks.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <trueshard/export.h>

namespace trueshard {

// What is sharded over the ranks. The bits of a run do not depend on it.
enum class Stage : int {
  Replicated = 0,  // nothing: gradients are reduced in shards and gathered, every rank steps everything
  Zero1 = 1,       // optimizer state and master weights; one pass of gradients stays whole until it is reduced
  Zero2 = 2,       // and gradients: each bucket of gradients is freed as soon as it is reduced
  Zero3 = 3,       // and parameters: a unit is whole only while operators use it
};

// The dtype of forward and backward. The optimizer works on fp32 masters in any case.
struct TRUESHARD_API MixedPrecisionPolicy {
  // bf16 or fp16; unset: every parameter computes in the dtype it has.
  TORCH_ARG(std::optional<c10::ScalarType>, param_dtype);
  // Names (as in named_modules()) of modules whose parameters keep their dtype, with everything below them. Batch-norm
  // modules always do.
  TORCH_ARG(std::vector<std::string>, full_precision_modules);
};

struct TRUESHARD_API ShardOptions {
  TORCH_ARG(Stage, stage) = Stage::Zero2;
  TORCH_ARG(MixedPrecisionPolicy, mp_policy);
  // Gradients are exchanged in buckets of up to this many bytes (of the compute dtype; larger parameters go alone).
  TORCH_ARG(int64_t, bucket_bytes) = int64_t{25} << 20;
  // true: a bucket is exchanged as soon as all ranks have its gradients. false: after the whole backward.
  TORCH_ARG(bool, overlap) = true;
  // The sum over all leaves is divided by this once. Unset: the number of ranks.
  TORCH_ARG(std::optional<double>, gradient_divide_factor);
  // true: a non-finite gradient on any rank makes step() skip on all ranks (counted in metrics()). false: step()
  // applies what it is given.
  TORCH_ARG(bool, skip_nonfinite_steps) = false;
  // Zero3: what is made whole together. Modules named here (as in named_modules()) are a unit each, with everything
  // below them that is not named too; elsewhere the largest modules of at most unit_bytes (of the compute dtype) are.
  TORCH_ARG(std::vector<std::string>, units);
  TORCH_ARG(int64_t, unit_bytes) = int64_t{8} << 20;
  // Zero3: units stay whole after their use as far as this many bytes go. Unset: twice the largest unit.
  TORCH_ARG(std::optional<int64_t>, resident_bytes);
  // Zero3: a thread of its own makes this many units whole ahead of their use, within resident_bytes, along the order
  // of the step before. Worth it where a core is idle.
  TORCH_ARG(int64_t, prefetch_units) = 0;
  // true: what all ranks of a host would hold alike, they hold once (Zero1, Zero2: the parameters that operators read;
  // Zero3: those whose masters can be read as they are, which are then never copied to be whole). A write in place
  // gives the rank its own copy of a page until the next step, which takes the value over as always. Where the system
  // can not tell which pages are copies, every rank holds its own.
  TORCH_ARG(bool, share_parameters) = true;
  // true: 16-bit parameters are stepped in their own dtype, without fp32 masters. The updates of small steps are then
  // lost.
  TORCH_ARG(bool, low_precision_master) = false;
  // true: vouches that an optimizer which trueshard does not know treats every element by itself.
  TORCH_ARG(bool, assume_elementwise) = false;
};

}  // namespace trueshard
