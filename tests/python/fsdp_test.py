# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 (fully_shard), FSDP1 and distributed checkpoints as they are, on this backend."""

import functools
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import ranks
from ranks import case
from reference import batch, leaves_of, loss_of, net, same_bits, tree_mean, tree_sum

CPU = torch.device("cpu")


def sharded(dtype=torch.float32, **options):
    model = net(dtype)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def shared_folder(rank):
    """One folder for all ranks; rank 0 makes and removes it."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


@case
def fsdp2_gives_the_canonical_tree(rank, world):
    model = sharded()
    loss_of(model, batch(rank)).backward()
    got = whole_gradients(model)
    for name, leaves in leaves_of(world).items():
        assert same_bits(got[name], tree_mean(leaves)), name


@case(worlds=[2, 4])
def fsdp2_and_ddp_agree_where_the_divisor_is_a_power_of_two(rank, world):
    model, ddp = sharded(), torch.nn.parallel.DistributedDataParallel(net())
    for m in (model, ddp):
        loss_of(m, batch(rank)).backward()
    got = whole_gradients(model)
    for name, parameter in ddp.module.named_parameters():
        assert same_bits(got[name], parameter.grad), name


@case
def the_divide_factor_of_fsdp2_is_applied_to_the_fp32_sum(rank, world):
    model = sharded()
    model.set_gradient_divide_factor(5.0)  # arrives as PREMUL_SUM(1 / 5)
    for module in model:
        if isinstance(module, torch.nn.Linear):
            module.set_gradient_divide_factor(5.0)
    loss_of(model, batch(rank)).backward()
    got = whole_gradients(model)
    for name, leaves in leaves_of(world).items():
        assert same_bits(got[name], tree_sum(leaves) * torch.tensor(1.0 / 5.0)), name


@case
def bf16_parameters_with_fp32_reduction_reduce_in_fp32(rank, world):
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    loss_of(model, batch(rank)).backward()
    got = whole_gradients(model)
    plain = net().to(torch.bfloat16)
    leaves = {n: [] for n in got}
    for r in range(world):
        plain.zero_grad()
        loss_of(plain, batch(r).to(torch.bfloat16)).backward()
        for name, p in plain.named_parameters():
            leaves[name].append(p.grad.clone())
    for name in got:
        assert same_bits(got[name], tree_mean(leaves[name])), name


@case
def bf16_reductions_are_rounded_once(rank, world):
    model = sharded(torch.bfloat16)
    loss_of(model, batch(rank, dtype=torch.bfloat16)).backward()
    got = whole_gradients(model)
    for name, leaves in leaves_of(world, dtype=torch.bfloat16).items():
        assert same_bits(got[name], tree_mean(leaves).to(torch.bfloat16)), name


@case
def fsdp2_trains_clips_and_accumulates(rank, world):
    model = sharded()
    plain = net()
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, plain)]
    for step in range(3):
        leaves = leaves_of(world, step, model=plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        for name, p in plain.named_parameters():
            p.grad = tree_mean(leaves[name])
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, plain)]
        assert torch.allclose(norms[0].full_tensor(), norms[1], rtol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters()):
        assert torch.allclose(a.full_tensor(), b, rtol=1e-4, atol=1e-6), name


@case(worlds=[2, 4])  # a 2 x n mesh
def hybrid_shards_are_reduced_twice(rank, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    loss_of(model, batch(rank)).backward()
    got = whole_gradients(model)
    for name, leaves in leaves_of(world).items():
        assert torch.allclose(got[name], tree_mean(leaves), rtol=1e-6), name


@case
def the_grad_scaler_works_on_shards(rank, world):
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(3):
        before = [p.full_tensor().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        scaler.scale(loss * float("inf") if step == 1 and rank == world - 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters()))
        assert moved == (step != 1), (step, moved)
    assert scaler.get_scale() == 2.0**9


@case
def checkpoints_come_back_bit_for_bit(rank, world):
    folder = shared_folder(rank)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=os.path.join(folder, "one"))
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    loss_of(model, batch(rank, 1)).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=os.path.join(folder, "one"))
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert all(same_bits(p.full_tensor(), before[name]) for name, p in model.named_parameters())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert rank != 0 or all(same_bits(whole[name], before[name]) for name in before)
    dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder, "two")).result()


@case
def fsdp1_trains(rank, world):
    for original in (True, False):
        wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
        model = FullyShardedDataParallel(net(), device_id=CPU, use_orig_params=original, auto_wrap_policy=wrap)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        plain = net()
        adam = torch.optim.AdamW(plain.parameters(), 1e-2)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
            leaves = leaves_of(world, step, model=plain)
            for name, p in plain.named_parameters():
                p.grad = tree_mean(leaves[name])
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            adam.step()
        with FullyShardedDataParallel.summon_full_params(model):
            for a, b in zip(model.parameters(), plain.parameters()):
                assert torch.allclose(a.reshape(-1)[: b.numel()], b.reshape(-1), rtol=1e-4, atol=1e-6) or not original


if __name__ == "__main__":
    ranks.main(__file__)
