# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's DCP on the state that checkpoint_bench saves: parameters and AdamW state of a sharded model, against the
same plain writer and reader in the same run, so that both programs' ratios can be set side by side.

usage: torchrun --nproc-per-node N bench/checkpoint_dcp.py [FOLDER [MILLION_PARAMETERS [ROUNDS]]]
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

PIECE = 8 << 20


class Net(torch.nn.Module):
    def __init__(self, millions):
        super().__init__()
        for i in range(millions):
            self.register_parameter(f"layer{i}", torch.nn.Parameter(torch.full((1000, 1000), 0.01)))


def plain_write(path, data):
    view = memoryview(data)
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for at in range(0, len(view), PIECE):
        os.write(fd, view[at:at + PIECE])
    os.fsync(fd)
    os.close(fd)


def plain_read(path, size):
    memory = torch.empty(size, dtype=torch.uint8)
    view = memoryview(memory.numpy())
    with open(path, "rb", buffering=0) as file:
        for at in range(0, size, PIECE):
            file.readinto(view[at:at + PIECE])


def timed(call):
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    millions = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = f"{root}/trueshard-dcp-bench-{os.environ['MASTER_PORT']}"
    os.makedirs(folder, exist_ok=True)
    model = Net(millions)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    size = millions * 1_000_000 * 12
    data = bytearray(size) if rank == 0 else b""
    times = {"raw_save": [], "save": [], "raw_load": [], "load": []}

    def save():
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=f"{folder}/dcp")

    def load():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    for number in range(-1, rounds):
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{folder}/dcp", ignore_errors=True)
            os.sync()
        row = {
            "raw_save": timed(lambda: plain_write(f"{folder}/raw", data) if rank == 0 else None),
            "save": timed(save),
            "raw_load": timed(lambda: plain_read(f"{folder}/raw", size) if rank == 0 else None),
            "load": timed(load),
        }
        if number >= 0:
            for key, value in row.items():
                times[key].append(value)
    if rank == 0:
        ratio = {k: statistics.median(a / b for a, b in zip(times[k], times["raw_" + k])) for k in ("save", "load")}
        print(json.dumps({"peer": "dcp", "ranks": dist.get_world_size(), "bytes": size,
                          **{f"{k}_s": round(statistics.median(v), 4) for k, v in times.items()},
                          "save_over_raw": round(ratio["save"], 3), "load_over_raw": round(ratio["load"], 3)}))
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
