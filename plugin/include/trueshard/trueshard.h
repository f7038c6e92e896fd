// SPDX-License-Identifier: BSD-3-Clause
// Everything a training program needs. See README.md for a first program and docs/ for the contract.
#pragma once
#include <trueshard/checkpoint.h>
#include <trueshard/clip_grad_norm.h>
#include <trueshard/full_parameters.h>
#include <trueshard/grad_scaler.h>
#include <trueshard/metrics.h>
#include <trueshard/process_group.h>
#include <trueshard/shard_options.h>
#include <trueshard/sharded_optimizer.h>
