# SPDX-License-Identifier: BSD-3-Clause
"""Tests of torch_suite.py that cannot pass here, each with the reason; and the fast part of the suite."""

EXCEPTIONS = {}

# These move tensors to a GPU without asking whether there is one; Gloo fails them on a CPU machine too.
NEEDS_GPU = ("cuda", "nccl")

# Beginnings of names: collectives, point to point, groups.
FAST = ("test_all_", "test_barrier", "test_broadcast", "test_gather", "test_irecv", "test_isend", "test_reduce",
        "test_scatter", "test_send", "test_batch", "test_sparse", "test_new_subgroups")
