# SPDX-License-Identifier: BSD-3-Clause
"""torch.ops.trueshard.*: values, mutation, fake tensors (torch.library.opcheck), and use inside saved TorchScript."""

import io
import math

import torch
import torch.distributed as dist

import ranks
from ranks import case, expect_error
from reference import same_bits, tree_mean, tree_sum

ops = torch.ops.trueshard
INF = float("inf")


def name():
    return dist.group.WORLD.group_name


def rows(seed, n, dtype=torch.float32):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


@case
def leaves_are_summed_in_the_canonical_order(rank, world):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for count in (1, 2, 3, 5, 8):
            leaves = [rows(i, 4, dtype) for i in range(count)]
            assert same_bits(ops.sum_leaves(leaves), tree_sum(leaves))
            mean = ops.sum_leaves(leaves, divisor=float(count), dtype=dtype)
            assert same_bits(mean, (tree_sum(leaves) / count).to(dtype))
    leaves = [rows(i, 4).t() for i in range(3)]  # strided
    assert same_bits(ops.sum_leaves(leaves), tree_sum(leaves))
    assert same_bits(ops.sum_leaves([torch.tensor([256.0]).bfloat16(), torch.ones(1).bfloat16()]), torch.tensor([257.0]))
    expect_error("expected 1 to 255", lambda: ops.sum_leaves([]))
    expect_error("sizes must be alike", lambda: ops.sum_leaves([rows(0, 2), rows(0, 3)]))
    expect_error("expected float32, bfloat16", lambda: ops.sum_leaves([rows(0, 2)], dtype=torch.float64))


@case
def shards_are_reduced_and_gathered_by_group_name(rank, world):
    leaves = [rows(r, 2 * world, torch.bfloat16) for r in range(world)]
    shard = ops.reduce_scatter(leaves[rank], name(), op="avg", dtype=torch.float32)
    expected = tree_mean(leaves)
    assert same_bits(shard, expected[2 * rank : 2 * rank + 2])
    assert same_bits(ops.all_gather(shard, name()), expected)
    assert ops.reduce_scatter(leaves[rank], name()).dtype == torch.bfloat16
    expect_error("expected 'sum' or 'avg'", lambda: ops.reduce_scatter(leaves[rank], name(), op="max"))
    expect_error("in a multiple of the group's", lambda: ops.reduce_scatter(rows(0, world + 1), name()))
    expect_error("nobody", lambda: ops.all_gather(shard, "nobody"))


@case
def unscaling_finds_what_any_rank_has(rank, world):
    gradients = [torch.full((5,), 8.0), torch.full((3,), 8.0, dtype=torch.float16), torch.full((4, 4), 8.0)[:, 1]]
    found = torch.zeros(1)
    for gradient in gradients:
        ops.unscale_and_check_(gradient, torch.tensor([0.125]), found)
    ops.agree_(found, name())
    assert found.item() == 0 and all(torch.equal(g, torch.ones_like(g)) for g in gradients)
    if rank == 1:
        gradients[0][2] = INF
    ops.unscale_and_check_(gradients[0], torch.tensor([1.0]), found)
    assert found.item() == (1 if rank == 1 else 0)
    ops.agree_(found, name())
    assert found.item() == 1
    expect_error("expected one float32 number", lambda: ops.agree_(torch.zeros(2), name()))


def norm_of(parts, whole=(), **options):
    return ops.get_total_norm(list(parts), list(whole), name(), **options)


@case
def one_norm_clips_all_shards_alike(rank, world):  # cases 7 to 11
    part = {0: [torch.tensor([3.0])], 1: [torch.tensor([4.0])]}.get(rank, [])
    whole = [torch.tensor([12.0])]
    norm = norm_of(part, whole)
    assert norm.item() == 13.0
    for gradient in part + whole:
        ops.clip_grads_with_norm_(gradient, 6.5, norm)
    assert abs(whole[0].item() - 6.0) < 1e-6 and (rank > 1 or abs(part[0].item() - [1.5, 2.0][rank]) < 1e-6)
    for p, expected in ((1.0, 15.0), (2.0, math.sqrt(83)), (3.0, 7.91046), (INF, 7.0)):
        part = {0: [torch.tensor([3.0, -7.0])], 1: [torch.tensor([5.0], dtype=torch.bfloat16)]}.get(rank, [])
        norm = norm_of(part, norm_type=p)
        assert abs(norm.item() - expected) < 1e-4, (p, norm)
        everywhere = [torch.empty_like(norm) for _ in range(world)]
        dist.all_gather(everywhere, norm)
        assert all(same_bits(n, norm) for n in everywhere)
    for value, dtype in ((1e20, torch.float32), (1e-30, torch.float32), (1e200, torch.float64), (300.0, torch.float16)):
        norm = norm_of([torch.full((2,), value, dtype=dtype)] if rank < 2 else []).item()
        assert abs(norm / (2 * value) - 1) < 1e-6, (value, norm)
    assert norm_of([]).item() == 0
    for bad in (INF, float("nan")):
        part = [torch.tensor([1.0, bad])] if rank == 1 else [torch.tensor([5.0])]
        before = part[0].clone()
        expect_error("on all ranks; look for the cause", lambda: norm_of(part, error_if_nonfinite=True))
        ops.clip_grads_with_norm_(part[0], 1.0, norm_of(part))
        assert same_bits(part[0], before)
    expect_error("expected a positive number", lambda: norm_of([], norm_type=0.0))
    expect_error("expected 0 or more", lambda: ops.clip_grads_with_norm_(torch.ones(1), -1.0, torch.ones(())))


def adam_state(n):
    return [torch.zeros(n), torch.zeros(n), None, torch.zeros(())]


def gradient_of(step):
    return torch.randn(1001, generator=torch.Generator().manual_seed(step))


@case
def fused_steps_follow_torch_optim(rank, world):
    for kind, op in ((torch.optim.AdamW, ops.adamw_), (torch.optim.Adam, ops.adam_)):
        for decay in (0.0, 0.1):
            plain = torch.nn.Parameter(torch.linspace(-1, 1, 1001))
            optimizer = kind([plain], lr=1e-2, weight_decay=decay, foreach=False)
            ours, state = plain.detach().clone(), adam_state(1001)
            for step in range(4):
                plain.grad = gradient_of(step)
                optimizer.step()
                scale = torch.tensor([4.0])
                op(ours, gradient_of(step) * 4, *state, lr=1e-2, weight_decay=decay, grad_scale=scale)
            assert torch.allclose(ours, plain.detach(), rtol=1e-6, atol=1e-7), (op, decay)
            assert state[3].item() == 4
    plain = torch.nn.Parameter(torch.linspace(-1, 1, 1001))
    optimizer = torch.optim.SGD([plain], lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=False)
    ours, buffer = plain.detach().clone(), torch.empty(1001)
    for step in range(4):
        plain.grad = gradient_of(step)
        optimizer.step()
        ops.sgd_(ours, gradient_of(step), buffer, lr=0.1, momentum=0.9, weight_decay=1e-3, first_step=step == 0)
    assert torch.allclose(ours, plain.detach(), rtol=1e-6, atol=1e-7)


@case
def a_found_inf_stops_a_fused_step(rank, world):  # case 14
    weight, state = torch.ones(5), adam_state(5)
    ops.adamw_(weight, torch.ones(5), *state, lr=0.1, grad_scale=torch.tensor([1024.0]), found_inf=torch.ones(1))
    assert torch.equal(weight, torch.ones(5)) and state[3].item() == 0 and not state[0].any()
    ops.sgd_(weight, torch.full((5,), 512.0), None, lr=1.0, grad_scale=torch.tensor([1024.0]), found_inf=torch.zeros(1))
    assert torch.equal(weight, torch.full((5,), 0.5))
    expect_error("no momentum_buffer was given", lambda: ops.sgd_(weight, torch.ones(5), None, lr=1.0, momentum=0.9))
    expect_error("expected a contiguous float32", lambda: ops.sgd_(weight, torch.ones(5).double(), None, lr=1.0))


@case
def opcheck_finds_nothing(rank, world):
    def check(operator, *args, **kwargs):
        torch.library.opcheck(operator.default, args, kwargs)

    leaves = [rows(i, 2 * world) for i in range(3)]
    check(ops.sum_leaves, leaves, divisor=3.0, dtype=torch.bfloat16)
    check(ops.reduce_scatter, leaves[0], name(), op="avg")
    check(ops.all_gather, leaves[0], name())
    check(ops.unscale_and_check_, torch.ones(3), torch.tensor([0.5]), torch.zeros(1))
    check(ops.agree_, torch.zeros(1), name())
    check(ops.get_total_norm, [torch.ones(3)], [torch.ones(2)], name())
    check(ops.clip_grads_with_norm_, torch.ones(3), 1.0, torch.tensor(3.0))
    check(ops.sgd_, torch.ones(3), torch.ones(3), torch.zeros(3), lr=0.1, momentum=0.9)
    check(ops.sgd_, torch.ones(3), torch.ones(3), None, lr=0.1)
    check(ops.adamw_, torch.ones(3), torch.ones(3), *adam_state(3), lr=0.1, found_inf=torch.zeros(1))
    check(ops.adam_, torch.ones(3), torch.ones(3), *adam_state(3), lr=0.1)
    x = torch.ones(world, 2, requires_grad=True)
    expect_error("trueshard::all_gather", lambda: ops.all_gather(x, name()).sum().backward())


class Step(torch.nn.Module):
    """A training step in script: mean gradients by shards, norm, fused step, whole parameters again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(12, 4))
        self.register_buffer("momentum", torch.zeros(12, 4))

    def forward(self, gradient: torch.Tensor, group: str, rank: int, world: int) -> torch.Tensor:
        n = 12 // world
        shard = torch.ops.trueshard.reduce_scatter(gradient, group, op="avg", dtype=torch.float32)
        torch.ops.trueshard.clip_grads_with_norm_(shard, 1.0, torch.ops.trueshard.get_total_norm([shard], [], group))
        mine = self.weight[rank * n : (rank + 1) * n].clone()
        momentum = self.momentum[rank * n : (rank + 1) * n]  # rows: contiguous
        torch.ops.trueshard.sgd_(mine, shard, momentum, lr=0.1, momentum=0.9)
        self.weight.copy_(torch.ops.trueshard.all_gather(mine, group))
        return self.weight


@case
def a_saved_script_uses_the_operators(rank, world):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Step()), buffer)
    buffer.seek(0)
    loaded, eager = torch.jit.load(buffer), Step()
    for step in range(4):  # through the profiling and the optimised plan
        gradient = torch.randn(12, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        assert same_bits(loaded(gradient, name(), rank, world), eager(gradient, name(), rank, world))
    assert loaded.weight.abs().sum() > 0 and loaded.momentum.abs().sum() > 0


class Scaled(torch.nn.Module):
    def __init__(self, group: str):
        super().__init__()
        self.scaler = torch.classes.trueshard.ShardedGradScaler(group, 1024.0, 2.0, 0.5, 2, True)
        self.weight = torch.nn.Parameter(torch.full((4,), 3.0))

    def forward(self, factor: float) -> bool:
        loss = self.scaler.scale((self.weight * 0.5).sum() * factor)
        gradient = torch.autograd.grad([loss], [self.weight])[0]
        assert gradient is not None
        self.scaler.unscale_([gradient])
        stepped = self.scaler.should_step()
        if stepped:
            with torch.no_grad():
                self.weight.sub_(gradient)
        self.scaler.update()
        return stepped


@case
def the_scaler_works_in_a_saved_script(rank, world):  # cases 13 to 16
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Scaled(name())), buffer)
    buffer.seek(0)
    module = torch.jit.load(buffer)
    assert module(1.0) and torch.equal(module.weight, torch.full((4,), 2.5))
    assert not module(INF if rank == world - 1 else 1.0) and torch.equal(module.weight, torch.full((4,), 2.5))
    assert module.scaler.get_scale() == 512 and module.scaler.skipped_steps() == 1
    assert module(1.0) and module(1.0) and module.scaler.get_scale() == 1024
    assert module(1.0) and module.scaler.growth_tracker() == 1
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    again = torch.jit.load(buffer)
    assert again.scaler.state_dict() == module.scaler.state_dict() and again.scaler.growth_tracker() == 1


@case
def the_scaler_refuses_what_would_divide_twice(rank, world):
    make = torch.classes.trueshard.ShardedGradScaler
    scaler = make(name(), 8.0, 2.0, 0.5, 2000, True)
    gradient = torch.full((3,), 4.0)
    assert scaler.unscale_([gradient]) and gradient.tolist() == [0.5] * 3
    expect_error("was already called since the last update", lambda: scaler.unscale_([gradient]))
    assert gradient.tolist() == [0.5] * 3
    scaler.should_step()
    expect_error("should_step: was already called", lambda: scaler.should_step())
    scaler.update()
    expect_error("update: no gradients were looked at", lambda: scaler.update())
    expect_error("expected more than 1", lambda: make(name(), 8.0, 1.0, 0.5, 2000, True))
    assert scaler.scale(torch.ones(1).half()).dtype == torch.float32
    state = dict(scaler.state_dict())
    state["scale"] = 2.0**20
    scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**20
    expect_error("has no '_growth_tracker'", lambda: scaler.load_state_dict({"scale": 1.0, "growth_factor": 2.0,
                                                                            "backoff_factor": 0.5, "growth_interval": 1.0}))
    off = make(name(), 8.0, 2.0, 0.5, 2000, False)
    assert off.scale(gradient) is not None and off.unscale_([gradient]) and off.should_step() and off.get_scale() == 1
    fused, flag = torch.ones(3), make("", 1024.0, 2.0, 0.5, 2000, True)
    scaled = torch.full((3,), 512.0)
    flag.check([scaled])
    ops.sgd_(fused, scaled, None, lr=1.0, grad_scale=flag.grad_scale(), found_inf=flag.found_inf())
    assert flag.should_step() and fused.tolist() == [0.5] * 3


if __name__ == "__main__":
    ranks.main(__file__)
