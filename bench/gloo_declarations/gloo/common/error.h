// SPDX-License-Identifier: BSD-3-Clause
// See algorithm.h.
#pragma once
