# SPDX-License-Identifier: BSD-3-Clause
"""The backend's side of torch.distributed's Python functions."""

from datetime import timedelta

import torch
import torch.distributed as dist

from trueshard import _C


def create_backend(options, process_group_options=None):
    """What torch.distributed calls to make the backend of one group; see Backend.register_backend(extended_api=True)."""
    known = torch._C._distributed_c10d.Backend.Options
    if process_group_options is not None and not isinstance(process_group_options, known):
        raise TypeError(
            f"trueshard[rank {options.group_rank}/{options.group_size}] init_process_group: pg_options is "
            f"{type(process_group_options).__name__}, expected None; this backend has no options beyond the timeout"
        )
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(milliseconds=timeout)
    return _C.create_backend(options.store, options.group_rank, options.group_size, options.group_id, timeout)


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
    """torch.distributed.monitored_barrier() for groups of this backend: torch's own refuses any backend but Gloo.

    An error names every rank that did not come within `timeout` (a timedelta; the group's own when None), whatever
    `wait_all_ranks` says. The group cannot be used after such an error.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("trueshard monitored_barrier: there is no default group; call init_process_group() first")
    _C.monitored_barrier(group._get_backend(torch.device("cpu")), timeout or timedelta(0), wait_all_ranks)
