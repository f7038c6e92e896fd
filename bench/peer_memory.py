# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory of training one Python model under trueshard.shard() and under what people use today.

usage: peer_memory.py [--ranks N] [--width W] [--layers L] [--length T] [--dtype fp32|bf16] [--only NAME,...]

Each row of peer_steps.py runs in processes of its own: model, sharding and three steps. Prints one JSON line per row: the
peak of the proportional set size (pages that ranks share count in equal parts) over what the process had before the model,
in bytes per parameter and rank, the mean over ranks; activations are in it. The first row is the floor: not sharded at all.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading

import peer_steps


def pss_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Peak(threading.Thread):
    """Looks every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = pss_bytes()
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.02):
            self.most = max(self.most, pss_bytes())

    def end(self):
        self.over.set()
        self.join()
        return max(self.most, pss_bytes()) - self.before


def run_rank(options):
    import torch
    import torch.distributed as dist

    import trueshard  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks)
    group = dist.new_group(backend="trueshard")
    make = peer_steps.factories(options, options.rank, group)[options.only]
    torch.nn.Linear(64, 64)(torch.ones(1, 64)).sum().backward()  # libtorch's own first allocations
    dist.barrier(group)
    peak = Peak()
    peak.start()
    row = make()
    for _ in range(3):
        row.step()
    grown = torch.tensor([float(peak.end())])
    dist.all_reduce(grown, dist.ReduceOp.SUM, group)
    if options.rank == 0:
        floor = peer_steps.make_model(options)
        elements = sum(p.numel() for p in floor.parameters())
        print(json.dumps({"bench": "peer memory", "ranks": options.ranks, "elements": elements, "dtype": options.dtype,
                          "row": options.only, "bytes_per_parameter": round(grown.item() / options.ranks / elements, 2)}), flush=True)
    dist.barrier(group)
    del row
    dist.destroy_process_group()


def main():
    options = peer_steps.parser(__doc__).parse_args()
    if options.rank is not None:
        return run_rank(options)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    status = 0
    for name in peer_steps.factories(options, 0, None):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--store", os.path.join(folder, "store")]
            children = [subprocess.Popen([*command, "--rank", str(rank)], env=dict(environment, LOCAL_RANK=str(rank))) for rank in range(options.ranks)]
            status |= max(abs(child.wait()) for child in children)
    return status


if __name__ == "__main__":
    sys.exit(main())
