# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of PyTorch's own clients, DDP and FSDP2, on this backend and on Gloo, in the same processes, sample by sample.

usage: client_steps.py [rounds]      PYTHONPATH: where the package trueshard is; prints one JSON line per row
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

WIDTH, LAYERS, BATCH = 512, 4, 16


def net():
    import torch

    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()]
    return torch.nn.Sequential(*layers)


def ddp(group):
    import torch

    return torch.nn.parallel.DistributedDataParallel(net(), process_group=group)


def fsdp2(group):
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_rank(rank, world, store, rounds):
    import torch
    import torch.distributed as dist

    import trueshard  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("trueshard", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {"trueshard": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    x = torch.randn(BATCH, WIDTH)
    rows = {}
    for client in (ddp, fsdp2):
        for backend, group in groups.items():
            model = client(group)
            rows[client.__name__, backend] = (model, torch.optim.AdamW(model.parameters(), 1e-4), [])
    slowest = torch.zeros(1, dtype=torch.float64)
    for round_ in range(rounds + 1):  # the first one warms up
        for model, optimizer, samples in rows.values():
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            slowest[0] = time.perf_counter() - start
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round_ > 0:
                samples.append(slowest.item())
    for (client, backend), (_, _, samples) in rows.items():
        if rank == 0:
            row = {"bench": "client_steps", "ranks": world, "row": f"{backend} {client}", "ms": 1e3 * statistics.median(samples),
                   "ms_min": 1e3 * min(samples), "ms_max": 1e3 * max(samples)}
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            common = [sys.executable, "-W", "ignore", __file__, str(rounds), os.path.join(folder, "store"), str(world)]
            ranks = [subprocess.Popen([*common, str(r)]) for r in range(world)]
            statuses = [rank.wait() for rank in ranks]
            if any(statuses):
                sys.exit(f"client_steps.py: exit statuses {statuses}")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        run_rank(int(sys.argv[4]), int(sys.argv[3]), sys.argv[2], int(sys.argv[1]))
    else:
        main()
