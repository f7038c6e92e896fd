# SPDX-License-Identifier: BSD-3-Clause
"""DTensor, functional collectives, object collectives and every reduction as Python sees it, on this backend."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ranks
from ranks import case, expect_error
from reference import same_bits, tree_mean, tree_sum


warnings.filterwarnings("ignore", category=FutureWarning)  # both names of the flat collectives are used here


@case
def dtensors_change_their_placement(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for rows in (8, 7):
        whole = torch.arange(rows * 6.0).reshape(rows, 6)
        a = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(a.full_tensor(), whole)
        assert torch.equal(a.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        assert torch.equal(a.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert a.sum().full_tensor() == whole.sum()
        assert torch.equal((a @ a.t()).full_tensor(), whole @ whole.t())


@case
def tensor_parallel_layers_match_the_plain_ones(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 8)
    assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)


@case
def functional_collectives_work(rank, world):
    group, x = dist.group.WORLD, torch.full((4,), float(rank + 1))
    total = world * (world + 1) / 2
    assert functional.all_reduce(x, "sum", group).tolist() == [total] * 4
    assert functional.all_gather_tensor(x, 0, group).reshape(world, 4)[:, 0].tolist() == [r + 1.0 for r in range(world)]
    assert functional.reduce_scatter_tensor(torch.ones(4 * world), "avg", 0, group).tolist() == [1.0] * 4
    assert functional.all_to_all_single(torch.arange(float(world)), None, None, group).tolist() == [float(rank)] * world
    assert functional.broadcast(x, 1, group).tolist() == [2.0] * 4
    assert functional.all_reduce_coalesced([x, 2 * x], "sum", group)[1].tolist() == [2 * total] * 4


@case
def objects_travel(rank, world):
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (1000 * rank)})
    assert [o["rank"] for o in everyone] == list(range(world))
    given = [("from", rank)]
    dist.broadcast_object_list(given, 1)
    assert given == [("from", 1)]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert rank != 0 or gathered == list(range(world))
    mine = [None]
    dist.scatter_object_list(mine, [10 * r for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [10 * rank]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        box = [None]
        dist.recv_object_list(box, 0)
        assert box == [{"a": 1}]


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def values_of(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (37,), generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(37, generator=generator).to(dtype)
    return torch.randint(0, 100, (37,), generator=generator).to(dtype)


def serial(op, leaves):
    """The reduction of all ranks' tensors, or None where it is not defined."""
    dtype, floating = leaves[0].dtype, leaves[0].dtype.is_floating_point
    if op in ("BAND", "BOR", "BXOR") and floating or op == "AVG" and not floating:
        return None
    if op == "AVG":
        return tree_mean(leaves).to(dtype)
    if op == "SUM" and floating:
        return tree_sum(leaves).to(dtype)
    if op == "PRODUCT" and floating:
        return tree_sum(leaves, torch.mul).to(dtype)
    as_bool = {"SUM": torch.logical_or, "PRODUCT": torch.logical_and, "MIN": torch.logical_and, "MAX": torch.logical_or}
    plain = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
             "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    function = as_bool.get(op, plain[op]) if dtype == torch.bool else plain[op]
    result = leaves[0]
    for leaf in leaves[1:]:
        result = function(result, leaf)
    return result


@case
def every_reduction_of_every_dtype_is_right_or_refused_on_all_ranks(rank, world):  # case 33
    for dtype in DTYPES:
        leaves = [values_of(r, dtype) for r in range(world)]
        for op in OPS:
            expected, reduce_op = serial(op, leaves), getattr(dist.ReduceOp, op)
            x = leaves[rank].clone()
            if expected is None:
                expect_error("is not defined", lambda: dist.all_reduce(x, reduce_op))
                assert torch.equal(x, leaves[rank])
                continue
            dist.all_reduce(x, reduce_op)
            assert same_bits(x, expected), (dtype, op, x, expected)
            part = torch.empty(37, dtype=dtype)
            whole = torch.cat([leaves[rank].roll(r) for r in range(world)])
            dist.reduce_scatter_tensor(part, whole, reduce_op)
            assert same_bits(part, serial(op, [leaf.roll(rank) for leaf in leaves])), (dtype, op)


@case
def averages_divide_by_the_group(rank, world):  # case 3
    group = dist.new_group([0, 1])
    if rank < 2:
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.tensor([2.0, 4, 6, 8]) * (1 + rank), dist.ReduceOp.AVG, group=group)
        assert part.tolist() == ([3, 6] if rank == 0 else [9, 12])
    x = torch.tensor([1.0])
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.25))
    assert x.item() == world / 4


@case
def strides_and_what_lies_between_them_are_respected(rank, world):  # case 28
    frame = torch.tensor([[rank + 1.0, -7], [rank + 1.0, -7]])
    dist.all_reduce(frame[:, 0])
    assert frame.tolist() == [[world * (world + 1) / 2, -7]] * 2
    frame = torch.tensor([[float(rank), -7], [float(rank), -7]])
    dist.broadcast(frame[:, 0], 1)
    assert frame.tolist() == [[1, -7]] * 2
    expect_error("is expanded", lambda: dist.all_reduce(torch.ones(1).expand(3)))


@case
def empty_tensors_take_part(rank, world):  # case 27
    for shape in ((0,), (1, 0, 2)):
        x = torch.empty(shape)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(shape) for _ in range(world)], x)
        dist.all_gather_into_tensor(torch.empty(0), x.reshape(-1))
        dist.reduce_scatter_tensor(torch.empty(0), x.reshape(-1))
        assert x.shape == shape
    y = torch.ones(1)
    dist.all_reduce(y)
    assert y.item() == world


@case
def different_calls_are_an_error_on_every_rank(rank, world):  # case 29
    odd = rank == world - 1
    expect_error("elements is", lambda: dist.all_reduce(torch.ones(6 if odd else 4)))
    expect_error("dtype is", lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)))
    expect_error("reduction is", lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM))
    expect_error("root is", lambda: dist.broadcast(torch.ones(4), 1 if odd else 0))
    parts = [torch.empty(4) for _ in range(world)]
    expect_error("operation is", lambda: dist.all_gather(parts, torch.ones(4)) if odd else dist.all_reduce(torch.ones(4)))
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x[0] == world


if __name__ == "__main__":
    ranks.main(__file__)
