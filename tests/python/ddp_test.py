# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel, ZeroRedundancyOptimizer and torch.amp.GradScaler as they are, on this backend."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ranks
from ranks import case
from reference import batch, leaves_of, loss_of, net, same_bits, tree_sum


def gradients(model):
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def step_of(model, rank, step=0):
    model.zero_grad()
    loss_of(model, batch(rank, step)).backward()
    return gradients(model)


@case
def ddp_gives_the_tree_over_the_leaves_that_it_hands_over(rank, world):
    got = step_of(DistributedDataParallel(net()), rank)
    for name, leaves in leaves_of(world).items():
        assert same_bits(got[name], tree_sum([leaf * (1.0 / world) for leaf in leaves])), name


@case
def the_bits_of_ddp_do_not_move_with_the_bucket_size(rank, world):
    torch.manual_seed(0)
    sizes = [torch.nn.Linear(64, 64) for _ in range(6)]
    reference = None
    for megabytes in (0.001, 0.02, 0.05, 25):
        model = DistributedDataParallel(torch.nn.Sequential(*sizes), bucket_cap_mb=megabytes)
        torch.manual_seed(100 + rank)
        for _ in range(2):  # buckets are rebuilt after the first pass
            model.zero_grad()
            model(torch.randn(8, 64)).pow(2).sum().backward()
            torch.manual_seed(100 + rank)
        got = gradients(model)
        reference = reference or got
        assert all(same_bits(got[name], reference[name]) for name in got), megabytes


@case
def ddp_leaves_the_same_bits_on_all_ranks(rank, world):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(4):
        step_of(model, rank, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for parameter in model.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(world)]
        dist.all_gather(everywhere, parameter.detach())
        assert all(same_bits(other, parameter.detach()) for other in everywhere)


@case
def no_sync_and_unused_parameters_work(rank, world):
    model = DistributedDataParallel(net())
    with model.no_sync():
        loss_of(model, batch(rank, 0)).backward()
    loss_of(model, batch(rank, 1)).backward()
    got = gradients(model)
    first, second = leaves_of(world, 0), leaves_of(world, 1)
    for name in got:
        expected = sum(a + b for a, b in zip(first[name], second[name])) / world
        assert torch.allclose(got[name], expected, rtol=1e-5, atol=1e-6), name

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.even = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x):
            return (self.odd if rank % 2 else self.even)(x)

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    model(torch.ones(1, 3)).sum().backward()
    assert model.module.even.bias.grad[0] == torch.tensor((world + 1) // 2 * (1.0 / world))


@case
def gradient_hooks_run(rank, world):
    plain = step_of(DistributedDataParallel(net()), rank)
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):  # torch wants NCCL for bf16's
        model = DistributedDataParallel(net())
        model.register_comm_hook(None, hook)
        got = step_of(model, rank)
        for name in got:
            if hook is default_hooks.allreduce_hook and world in (2, 4):
                assert same_bits(got[name], plain[name])
            assert torch.allclose(got[name], plain[name], rtol=3e-2, atol=3e-2), (hook, name)


@case
def ranks_with_less_data_join(rank, world):
    model = DistributedDataParallel(net())
    steps = 0
    with Join([model]):
        for step in range(2 + rank):
            step_of(model, rank, step)
            steps += 1
    assert steps == 2 + rank
    dist.barrier()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(1 + rank):
            step_of(model, rank, step)
            optimizer.step()


@case
def the_zero_redundancy_optimizer_steps_like_the_plain_one(rank, world):
    sharded, plain = DistributedDataParallel(net()), DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.AdamW, lr=1e-2)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        for model, optimizer in ((sharded, zero), (plain, adam)):
            step_of(model, rank, step)
            optimizer.step()
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(sharded.parameters(), plain.parameters()))
    zero.consolidate_state_dict(0)
    if rank == 0:
        assert len(zero.state_dict()["state"]) == len(list(plain.parameters()))


@case
def the_grad_scaler_skips_on_all_ranks_alike(rank, world):
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        scaler.scale(loss * float("inf") if step == 1 and rank == world - 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
        assert moved == (step != 1)
    assert scaler.get_scale() == 2.0**9


@case
def sparse_embedding_gradients_are_reduced(rank, world):
    torch.manual_seed(0)
    sparse, dense = torch.nn.Embedding(20, 4, sparse=True), torch.nn.Embedding(20, 4)
    dense.load_state_dict(sparse.state_dict())
    index = torch.tensor([rank, rank + 1, 7])
    results = []
    for module in (sparse, dense):
        model = DistributedDataParallel(module)
        (model(index) * (rank + 1)).sum().backward()
        grad = module.weight.grad
        results.append(grad.to_dense() if grad.is_sparse else grad)
    assert torch.equal(*results)


@case
def batch_norm_is_synchronised_and_buffers_are_broadcast(rank, world):
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    for _ in range(2):
        model(torch.randn(6, 4) + rank).sum().backward()
    model(torch.randn(6, 4))  # its forward sends rank 0's buffers
    mean = model.module[1].running_mean
    assert mean.isfinite().all()


if __name__ == "__main__":
    ranks.main(__file__)
