# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed ZeRO-1, 2 and 3 on CPU, and Accelerate, unchanged on this backend. Runs what is installed:
pip install deepspeed accelerate
"""

import os

import torch
import torch.distributed as dist

import ranks
from ranks import Skip, case
from reference import batch, leaves_of, loss_of, net, tree_mean


def trained_plainly(world, steps, lr):
    """The same steps in one process, with the mean of all ranks' gradients."""
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr)
    for step in range(steps):
        leaves = leaves_of(world, step, model=plain)
        for name, p in plain.named_parameters():
            p.grad = tree_mean(leaves[name])
        optimizer.step()
    return plain


def deepspeed_or_skip():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as missing:
        raise Skip(f"DeepSpeed is not installed ({missing})") from missing
    return deepspeed


@case
def deepspeed_trains_in_every_stage(rank, world):
    deepspeed = deepspeed_or_skip()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
    deepspeed.init_distributed(dist_backend="trueshard", auto_mpi_discovery=False)
    plain = trained_plainly(world, 3, 1e-2)
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "reduce_scatter": True},
            "zero_force_ds_cpu_optimizer": False,
        }
        model = net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(3):
            engine.backward(loss_of(engine, batch(rank, step)))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            for a, b in zip(engine.module.parameters(), plain.parameters()):
                assert torch.allclose(a.detach(), b.detach(), rtol=1e-4, atol=1e-5), stage


@case
def accelerate_uses_the_default_group(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
    try:
        from accelerate import Accelerator
    except ImportError as missing:
        raise Skip(f"Accelerate is not installed ({missing})") from missing
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world and dist.get_backend() == "trueshard"
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch(rank, step)))
        optimizer.step()
    plain = trained_plainly(world, 3, 1e-2)
    for a, b in zip(accelerator.unwrap_model(model).parameters(), plain.parameters()):
        assert torch.allclose(a.detach(), b.detach(), rtol=1e-4, atol=1e-5)
    assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(world))


if __name__ == "__main__":
    ranks.main(__file__)
