# SPDX-License-Identifier: BSD-3-Clause
"""Tests of torch_suite.py that cannot pass here, each with the reason; and the fast part of the suite."""

# By the beginning of the name.
EXCEPTIONS = {
    "test_SyncBatchNorm_process_group": "needs torchvision; without it Gloo fails, too",
    "test_batch_isend_irecv_mixed_backend_err": "needs a torch with NCCL; without it Gloo fails, too",
    "test_batch_isend_irecv_op_err": "needs a GPU; without one Gloo fails, too",
    "test_ddp_logging_data_cpu": "torch's DDP logger calls every third-party backend 'custom'",
    "test_new_subgroups_with_group_param": "wants four ranks and does not say so; with fewer Gloo fails, too",
    "test_monitored_barrier": "torch's Python refuses it for every backend but Gloo; trueshard.monitored_barrier() has its own test",
}

# These move tensors to a GPU without asking whether there is one; Gloo fails them on a CPU machine too.
NEEDS_GPU = ("cuda", "nccl")

# Beginnings of names: collectives, point to point, groups.
FAST = ("test_all_", "test_barrier", "test_broadcast", "test_gather", "test_irecv", "test_isend", "test_reduce",
        "test_scatter", "test_send", "test_batch", "test_sparse", "test_new_subgroups")
