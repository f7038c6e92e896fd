# SPDX-License-Identifier: BSD-3-Clause
"""Writes a whole training step as one TorchScript module: forward, loss scaling, backward, mean over ranks, clipping, AdamW on
this rank's shard of the fp32 parameters, and the parameters again.

usage: step.py LIBRARY OUTPUT.pt      LIBRARY: libtrueshard.so (trueshard.library_path of the Python package)
"""

import sys
from typing import List

import torch

torch.ops.load_library(sys.argv[1])
ops = torch.ops.trueshard


class TrainStep(torch.nn.Module):
    def __init__(self, group: str):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.group = group
        self.scaler = torch.classes.trueshard.ShardedGradScaler(group, 2.0**125, 2.0, 0.5, 2000, True)
        elements = sum(p.numel() for p in self.net.parameters())
        self.register_buffer("exp_avg", torch.zeros(elements))
        self.register_buffer("exp_avg_sq", torch.zeros(elements))
        self.register_buffer("steps", torch.zeros(()))

    def parameter_list(self) -> List[torch.Tensor]:
        return [self.net[0].weight, self.net[0].bias, self.net[2].weight, self.net[2].bias]

    def forward(self, x: torch.Tensor, y: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        loss = ((self.net(x) - y) ** 2).mean()
        parameters = self.parameter_list()
        flat: List[torch.Tensor] = []
        for gradient in torch.autograd.grad([self.scaler.scale(loss)], parameters):
            assert gradient is not None
            flat.append(gradient.reshape(-1))
        whole = torch.cat(flat)
        n = (whole.numel() + world - 1) // world
        padded = torch.cat([whole, torch.zeros(n * world - whole.numel())])
        shard = torch.ops.trueshard.reduce_scatter(padded, self.group, op="avg")
        self.scaler.unscale_([shard])
        if self.scaler.should_step():
            norm = torch.ops.trueshard.get_total_norm([shard], [], self.group)
            torch.ops.trueshard.clip_grads_with_norm_(shard, 1.0, norm)
            self.step(parameters, shard, rank, world)
        self.scaler.update()
        return loss.detach()

    def step(self, parameters: List[torch.Tensor], shard: torch.Tensor, rank: int, world: int) -> None:
        with torch.no_grad():
            elements, n = self.exp_avg.numel(), shard.numel()
            begin = min(rank * n, elements)
            end = min(begin + n, elements)
            master = torch.cat([p.detach().reshape(-1) for p in parameters])[begin:end].clone()
            # The moments of this rank's shard; the others' stay zero.
            torch.ops.trueshard.adamw_(
                master, shard[: end - begin], self.exp_avg[begin:end], self.exp_avg_sq[begin:end], None, self.steps, lr=0.02
            )
            mine = torch.cat([master, torch.zeros(n - master.numel())])
            whole = torch.ops.trueshard.all_gather(mine, self.group)
            offset = 0
            for p in parameters:
                p.copy_(whole[offset : offset + p.numel()].view_as(p))
                offset += p.numel()

    @torch.jit.export
    def scaler_numbers(self) -> List[float]:
        state = self.scaler.state_dict()
        return [state["scale"], state["_growth_tracker"], float(self.scaler.skipped_steps())]


torch.jit.save(torch.jit.script(TrainStep("training")), sys.argv[2])
