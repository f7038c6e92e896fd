# SPDX-License-Identifier: BSD-3-Clause
"""A user's first program under torchrun on three ranks, with and without `import trueshard`."""

import os
import subprocess
import sys

if "RANK" not in os.environ:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", __file__]
    sys.exit(subprocess.run(launcher, timeout=240).returncode)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import trueshard  # noqa: E402

dist.init_process_group("trueshard")
rank, world = dist.get_rank(), dist.get_world_size()
assert world == 3 and dist.get_backend() == "trueshard", (world, dist.get_backend())
assert trueshard.build_info().startswith(f"trueshard {trueshard.__version__}, compiled for torch "), trueshard.build_info()

x = torch.tensor([1e8, 1.0, 3.0]) * (1 if rank != 2 else -1)
dist.all_reduce(x)
assert x.tolist() == [1e8, 1.0, 3.0], x  # (r0 + r1) + r2, in this order

part = torch.empty(2, dtype=torch.bfloat16)
dist.reduce_scatter_tensor(part, torch.arange(6, dtype=torch.bfloat16) + rank, op=dist.ReduceOp.AVG)
assert part.tolist() == [2 * rank + 1, 2 * rank + 2], part

whole = torch.empty(6, dtype=torch.int64)
dist.all_gather_into_tensor(whole, torch.tensor([rank, 10 * rank]))
assert whole.tolist() == [0, 0, 1, 10, 2, 20], whole

dist.destroy_process_group()
dist.init_process_group("trueshard")  # again, on the agent's store
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} done")
