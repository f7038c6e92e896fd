# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of one Python model under trueshard.shard() and under what people use today, interleaved in one run.

usage: peer_steps.py [--ranks N] [--width W] [--layers L] [--length T] [--rounds R] [--dtype fp32|bf16] [--only NAME,...]

Prints one JSON line per row: the median over rounds of the slowest rank's step, and its ratio to the floor (the same model
in the same ranks without communication, libtorch's fused AdamW). Peers run over gloo; DeepSpeed's rows appear where it is
installed. PYTHONPATH must lead to the package trueshard.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def make_model(options):
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = options.width
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, width = x.shape
            split = self.qkv(self.norm1(x)).view(batch, length, 3, 6, width // 6).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(256, options.width), nn.Embedding(options.length, options.width)
            self.blocks = nn.ModuleList([Block() for _ in range(options.layers)])
            self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, 256, bias=False)

        def forward(self, ids):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Decoder()


class Row:
    """One way to train: `step` runs forward, backward, clip and step."""

    def __init__(self, options, rank):
        import torch

        self.options, self.dtype = options, torch.bfloat16 if options.dtype == "bf16" else torch.float32
        self.ids = torch.randint(0, 256, (4, options.length + 1), generator=torch.Generator().manual_seed(rank))
        self.model = make_model(options)

    def loss(self, model):
        from torch.nn import functional

        return functional.cross_entropy(model(self.ids[:, :-1]).float().flatten(0, 1), self.ids[:, 1:].flatten())

    def adamw(self, parameters):
        import torch

        return torch.optim.AdamW(parameters, 1e-4, fused=True)


class Floor(Row):
    def __init__(self, options, rank):
        super().__init__(options, rank)
        self.model.to(self.dtype)
        self.optimizer = self.adamw(self.model.parameters())

    def step(self):
        import torch

        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class Trueshard(Row):
    def __init__(self, options, rank, stage, group):
        import torch

        import trueshard

        super().__init__(options, rank)
        self.clip = trueshard.clip_grad_norm_
        cast = {"param_dtype": self.dtype} if options.dtype == "bf16" else {}
        self.optimizer = trueshard.shard(self.model, torch.optim.AdamW(self.model.parameters(), 1e-4), group, stage=stage, **cast)

    def step(self):
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.clip(self.optimizer, 1.0)
        self.optimizer.step()


class Ddp(Floor):
    def __init__(self, options, rank):
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(options, rank)
        self.model = DistributedDataParallel(self.model)


class Fsdp2(Floor):
    def __init__(self, options, rank):
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        Row.__init__(self, options, rank)
        mesh = init_device_mesh("cpu", (options.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = self.adamw(self.model.parameters())


class DeepSpeed(Row):
    def __init__(self, options, rank, stage):
        import deepspeed

        super().__init__(options, rank)
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "steps_per_print": 10**9,
                  "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}, "bf16": {"enabled": options.dtype == "bf16"}}
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer = self.adamw(self.model.parameters())
            self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

    def step(self):
        self.engine.backward(self.loss(self.engine))
        self.engine.step()


def factories(options, rank, group):
    table = {"no communication": lambda: Floor(options, rank)}
    for stage, name in enumerate(("replicated", "zero1", "zero2", "zero3")):
        table["trueshard " + name] = lambda stage=stage: Trueshard(options, rank, stage, group)
    table["ddp gloo"] = lambda: Ddp(options, rank)
    table["fsdp2 gloo"] = lambda: Fsdp2(options, rank)
    if importlib.util.find_spec("deepspeed"):
        for stage in (1, 2, 3):
            table[f"deepspeed zero{stage}"] = lambda stage=stage: DeepSpeed(options, rank, stage)
    wanted = options.only.split(",") if options.only else list(table)
    return {name: make for name, make in table.items() if name in wanted or name == "no communication"}


def run_rank(options):
    import torch
    import torch.distributed as dist

    import trueshard  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=options.ranks)
    group = dist.new_group(backend="trueshard")
    rows = {name: make() for name, make in factories(options, options.rank, group).items()}
    seconds = {name: [] for name in rows}
    for turn in range(options.rounds + 2):
        for name, row in rows.items():
            dist.barrier(group)
            start = time.perf_counter()
            for _ in range(2):
                row.step()
            taken = torch.tensor([(time.perf_counter() - start) / 2])
            dist.all_reduce(taken, dist.ReduceOp.MAX, group)
            if turn >= 2:
                seconds[name].append(taken.item())
    if options.rank == 0:
        floor = statistics.median(seconds["no communication"])
        elements = sum(p.numel() for p in rows["no communication"].model.parameters())
        for name, samples in seconds.items():
            ratios = sorted(s / f for s, f in zip(samples, seconds["no communication"]))
            print(json.dumps({"bench": "peer step", "ranks": options.ranks, "elements": elements, "tokens": 4 * options.length,
                              "dtype": options.dtype, "row": name, "ms": round(1e3 * statistics.median(samples), 2),
                              "floor_ms": round(1e3 * floor, 2), "ratio": round(statistics.median(ratios), 3),
                              "range": [round(ratios[0], 3), round(ratios[-1], 3)]}), flush=True)
    dist.barrier(group)
    rows.clear()
    gc.collect()
    dist.destroy_process_group()


def parser(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", default="")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    return parser


def main():
    options = parser(__doc__).parse_args()
    if options.rank is not None:
        return run_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", os.path.join(folder, "store")]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        children = [subprocess.Popen([*command, "--rank", str(rank)], env=dict(environment, LOCAL_RANK=str(rank))) for rank in range(options.ranks)]
        return max(abs(child.wait()) for child in children)


if __name__ == "__main__":
    sys.exit(main())
