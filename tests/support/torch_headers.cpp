// SPDX-License-Identifier: BSD-3-Clause
// Carries the precompiled headers of the tests (TRUESHARD_PRECOMPILE_TORCH).
int main() { return 0; }
