# SPDX-License-Identifier: BSD-3-Clause
"""Point-to-point transfers, coalescing and what else torch.distributed calls beside the collectives."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import trueshard

import ranks
from ranks import case, expect_error

CPU = torch.device("cpu")


def backend(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


@case
def sends_arrive_for_every_dtype_and_stride(rank, world):
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
    for dtype in dtypes:
        data = (torch.arange(12) % 2 if dtype == torch.bool else torch.arange(12)).reshape(3, 4).to(dtype)
        if rank == 0:
            dist.send(data.t(), 1)
        elif rank == 1:
            frame = torch.full((4, 6), 5).to(dtype)
            dist.recv(frame[:, ::2], 0)
            assert torch.equal(frame[:, ::2], data.t()) and torch.equal(frame[:, 1::2], torch.full((4, 3), 5).to(dtype))


@case
def a_ring_of_large_and_empty_messages_passes(rank, world):
    for elements in (0, 1, 70_000, 3_000_001):  # beyond the pieces of the ring
        mine = torch.full((elements,), float(rank))
        theirs = torch.full((elements,), -1.0)
        work = [dist.isend(mine, (rank + 1) % world), dist.irecv(theirs, (rank - 1) % world)]
        for w in work:
            w.wait()
        assert torch.equal(theirs, torch.full((elements,), float((rank - 1) % world))), elements


@case
def tags_match_in_any_order(rank, world):
    if rank == 0:
        work = [dist.isend(torch.full((100_000,), float(tag)), 1, tag=tag) for tag in range(40)]
        for w in work:
            w.wait()
    elif rank == 1:
        for tag in reversed(range(40)):
            got = torch.empty(100_000)
            dist.recv(got, 0, tag=tag)
            assert got[0] == tag and got[-1] == tag
    dist.barrier()
    if rank == 0:  # one tag: in the order of the calls
        for i in range(50):
            dist.isend(torch.tensor([i]), 1)
        dist.recv(torch.empty(1), 1)
    elif rank == 1:
        for i in range(50):
            got = torch.empty(1, dtype=torch.int64)
            dist.recv(got, 0)
            assert got.item() == i
        dist.send(torch.empty(1), 0)


@case
def recv_from_any_names_its_source(rank, world):
    if rank != 0:
        dist.send(torch.tensor([rank]), 0)
        return
    seen = set()
    for _ in range(world - 1):
        got = torch.empty(1, dtype=torch.int64)
        source = dist.recv(got)
        assert source == got.item()
        seen.add(source)
    assert seen == set(range(1, world))


@case
def transfers_go_on_beside_collectives(rank, world):
    got = torch.zeros(4)
    work = dist.irecv(got, (rank - 1) % world)  # before the send it waits for
    x = torch.ones(1000)
    dist.all_reduce(x)
    dist.send(torch.full((4,), float(rank)), (rank + 1) % world)
    work.wait()
    assert x[0] == world and got.tolist() == [(rank - 1) % world] * 4


@case
def batches_of_transfers_are_owned_by_their_end(rank, world):
    before, after = torch.empty(5), torch.empty(7)
    operations = [
        dist.P2POp(dist.irecv, before, (rank - 1) % world),
        dist.P2POp(dist.isend, torch.full((7,), float(rank)), (rank - 1) % world, tag=0),
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % world, tag=0),
        dist.P2POp(dist.irecv, after, (rank + 1) % world),
    ]
    if world > 2:  # with two ranks both neighbours are one, and sizes would have to follow the order
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert before.tolist() == [(rank - 1) % world] * 5 and after.tolist() == [(rank + 1) % world] * 7
    dist.barrier()


@case
def coalesced_calls_end_together(rank, world):
    from torch.distributed.distributed_c10d import _coalescing_manager

    a, b, c = torch.ones(10), torch.full((3,), float(rank)), torch.empty(2)
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    assert a[0] == world and b[0] == world * (world - 1) / 2
    dist.group.WORLD._start_coalescing(CPU)
    dist.broadcast(c.fill_(rank), 1, async_op=True)
    dist.all_reduce(a, async_op=True)
    send = dist.isend(torch.tensor([rank]), (rank + 1) % world)
    got = torch.empty(1, dtype=torch.int64)
    dist.irecv(got, (rank - 1) % world)
    dist.group.WORLD._end_coalescing(CPU).wait()
    assert send.is_completed() and got.item() == (rank - 1) % world and a[0] == world * world and c.tolist() == [1, 1]
    expect_error("no calls are being coalesced", lambda: dist.group.WORLD._end_coalescing(CPU))
    x = torch.ones(1)
    dist.all_reduce(x)  # after all that the group is in step
    assert x.item() == world


@case
def sizes_and_dtypes_that_differ_are_an_error_on_both(rank, world):
    if rank == 0:
        work = dist.isend(torch.ones(4), 1)
        expect_error("this rank sends 4 elements of float32, rank 1 receives 6 elements of float32", work.wait)
        work = dist.isend(torch.ones(4), 1)
        expect_error("sends 4 elements of float32, rank 1 receives 4 elements of int32", work.wait)
    elif rank == 1:
        frame = torch.full((6,), -7.0)
        expect_error("rank 0 sends 4 elements of float32, this rank receives 6", lambda: dist.recv(frame, 0))
        assert frame.tolist() == [-7.0] * 6
        expect_error("sends 4 elements of float32", lambda: dist.recv(torch.empty(4, dtype=torch.int32), 0))
    dist.barrier()


@case
def what_one_side_cannot_do_is_an_error_on_both(rank, world):
    if rank == 0:
        expect_error("could not receive", dist.isend(torch.ones(4), 1).wait)
    elif rank == 1:
        expect_error("is expanded", lambda: dist.recv(torch.ones(1).expand(4), 0))
    dist.barrier()


@case
def sequence_numbers_count_the_collectives(rank, world):
    group = dist.new_group()
    first = backend(group)._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    dist.broadcast(torch.ones(1), 0, group=group)
    assert backend(group)._get_sequence_number_for_group() == first + 4
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    dist.destroy_process_group(group)


@case(worlds=[3, 4])
def a_monitored_barrier_names_who_is_late(rank, world):
    trueshard.monitored_barrier()
    group = dist.new_group()
    trueshard.monitored_barrier(group)
    if rank != 1:
        text = expect_error(
            "rank 1 has not posted 'monitored_barrier'|the group has failed",
            lambda: trueshard.monitored_barrier(group, timedelta(milliseconds=300)),
        )
        assert "rank 1 has not posted 'monitored_barrier'" in text, text
        expect_error("the group has failed", lambda: dist.all_reduce(torch.ones(1), group=group))
    dist.barrier()


@case
def futures_carry_the_result(rank, world):
    x = torch.full((3,), float(rank))
    result = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait()
    assert result.tolist() == [world * (world - 1)] * 3


@case
def groups_are_split(rank, world):
    part = dist.group.WORLD.split_group([0, 1], timedelta(seconds=30), None, "pair", "a pair") if rank < 2 else None
    if part is not None:
        x = torch.tensor([float(rank + 1)])
        part.allreduce([x]).wait()
        assert x.item() == 3 and part.size() == 2 and part.rank() == rank
        assert part.group_name == "pair", part.group_name
        expect_error("group 'pair'", lambda: part.allreduce([torch.ones(1 + rank)]).wait())
    dist.barrier()


@case
def subgroups_of_every_size_work(rank, world):
    for size in range(1, world + 1):
        members = list(range(world - size, world))
        group = dist.new_group(members)
        if rank in members:
            x = torch.tensor([1.0, float(rank)])
            dist.all_reduce(x, group=group)
            assert x.tolist() == [size, sum(members)]
            dist.barrier(group=group)
            objects = [None] * size
            dist.all_gather_object(objects, {"rank": rank}, group=group)
            assert [o["rank"] for o in objects] == members


@case
def sparse_tensors_are_summed_like_dense_ones(rank, world):
    torch.manual_seed(rank)
    for shape, dims in (((50, 3), 1), ((6, 7), 2), ((4, 5, 2), 2)):
        dense = torch.randn(shape) * (torch.rand(shape[:dims]) < 0.3).reshape(shape[:dims] + (1,) * (len(shape) - dims))
        sparse = dense.to_sparse(dims)
        dist.all_reduce(dense)
        dist.all_reduce(sparse)
        assert torch.equal(sparse.to_dense(), dense)
    nothing = torch.zeros(5, 2).to_sparse(1)
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0
    expect_error("operation is|detail is", lambda: dist.all_reduce(torch.zeros(5 + (rank == 0)).to_sparse()))


@case
def uneven_and_unequal_pieces_go_all_to_all(rank, world):
    inputs = [torch.full((rank + r,), float(10 * rank + r)) for r in range(world)]
    outputs = [torch.empty(rank + r) for r in range(world)]
    dist.all_to_all(outputs, inputs)
    for r in range(world):
        assert outputs[r].tolist() == [10 * r + rank] * (rank + r)
    flat = torch.empty(sum(rank + r for r in range(world)))
    splits = [rank + r for r in range(world)]
    dist.all_to_all_single(flat, torch.cat(inputs), splits, splits)
    assert torch.equal(flat, torch.cat(outputs))


@case
def a_forked_child_may_run_and_exit(rank, world):
    work = dist.irecv(torch.empty(1), (rank + 1) % world)  # threads exist
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    child = os.fork()
    if child == 0:
        try:
            expect_error("was forked from the one that made the group", lambda: dist.all_reduce(torch.ones(1)))
            dist.destroy_process_group()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    dist.send(torch.ones(1), (rank - 1) % world)
    work.wait()


if __name__ == "__main__":
    ranks.main(__file__)
