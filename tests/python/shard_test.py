# SPDX-License-Identifier: BSD-3-Clause
"""trueshard.shard() on Python's modules, eager and scripted, in every stage."""

import hashlib

import torch
from torch import nn

import trueshard

import ranks
from ranks import case, expect_error
from reference import batch, leaves_of, loss_of, net, same_bits, tree_sum

ALL_STAGES = list(trueshard.Stage)


class Twin(nn.Module):
    """Batch norm, a GRU, and a tied table that is read outside any submodule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(23, 12)
        self.norm = nn.BatchNorm1d(12)
        self.gru = nn.GRU(12, 12, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        y, _ = self.gru(x.unsqueeze(0))
        return torch.matmul(y.squeeze(0) + x, self.table.weight.t())


def tokens(rank, step):
    return torch.randint(0, 23, (32,), generator=torch.Generator().manual_seed(100 * step + rank))


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().clone().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def train(module, rank, stage, scaled=False, **options):
    optimizer = trueshard.shard(module, torch.optim.AdamW(module.parameters(), 1e-2), stage=stage, unit_bytes=1000,
                                resident_bytes=0, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = trueshard.ShardedGradScaler(init_scale=1024.0, growth_interval=2, enabled=scaled)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        x = tokens(rank, step)
        for last in (False, True):
            loss = nn.functional.cross_entropy(module(x).float(), (x * 5 + 1).remainder(23))
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(trueshard.clip_grad_norm_(optimizer, 0.5))
        assert scaler.step(optimizer) is True
        scaler.update()
        schedule.step()
    if scaled:
        assert scaler.get_scale() == 4096.0
    return digest(trueshard.full_state_dict(optimizer)[name] for name, _ in module.named_parameters()), norms


@case
def eager_and_scripted_modules_have_the_same_bits_in_every_stage(rank, world):
    for make in (Twin, lambda: torch.jit.script(Twin())):
        results = [train(make(), rank, stage) for stage in ALL_STAGES]
        assert all(result == results[0] for result in results), results


@case
def bf16_compute_with_fp32_masters(rank, world):
    results = [train(Twin(), rank, stage, scaled=True, param_dtype=torch.bfloat16, full_precision_modules=["gru", "table"])
               for stage in ALL_STAGES]
    assert all(result == results[0] for result in results), results


@case
def the_gradient_is_the_tree_and_the_step_is_sgds(rank, world):
    for stage in ALL_STAGES:
        model = net()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = trueshard.shard(model, torch.optim.SGD(model.parameters(), 0.25), stage=stage)
        loss_of(model, batch(rank)).backward()
        optimizer.step()
        after = trueshard.full_state_dict(optimizer)
        for name, leaves in leaves_of(world).items():
            expected = before[name].add(tree_sum(leaves) / world, alpha=-0.25)
            assert same_bits(after[name], expected), (stage, name)


@case
def full_parameters_are_read_and_written_under_the_guard(rank, world):
    model = net()
    optimizer = trueshard.shard(model, torch.optim.SGD(model.parameters(), 0.25), stage=3)
    expect_error("is sharded .Stage::Zero3. and not whole", lambda: model[0].weight.untyped_storage().data_ptr())
    with optimizer.full_parameters():
        with torch.no_grad():
            model[0].weight.fill_(0.5)
    assert torch.equal(model[0].weight.detach().clone(), torch.full_like(model[0].weight, 0.5))
    plain = net()
    plain.load_state_dict(trueshard.full_state_dict(optimizer))
    with torch.no_grad():
        assert same_bits(plain(batch(0)), model(batch(0)))


@case
def deferred_passes_and_metrics(rank, world):
    model = net()
    optimizer = trueshard.shard(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), stage=trueshard.Stage.ZERO3)
    with optimizer.no_sync():
        loss_of(model, batch(rank, 0)).backward()
    assert optimizer.metrics()["passes"] == 0
    loss_of(model, batch(rank, 1)).backward()
    assert optimizer.metrics()["passes"] == 1
    optimizer.step()
    assert optimizer.metrics()["steps"] == 1


@case
def what_can_not_be_done_is_refused(rank, world):
    model = net()
    expect_error("expected torch.optim's", lambda: trueshard.shard(model, torch.optim.LBFGS(model.parameters())), TypeError)
    maximizing = torch.optim.SGD(model.parameters(), 0.1, maximize=True)
    expect_error("negate the loss", lambda: trueshard.shard(model, maximizing), ValueError)
    expect_error("unknown option 'stages'", lambda: trueshard.shard(model, torch.optim.SGD(model.parameters(), 0.1), stages=3), TypeError)
    old = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = trueshard.shard(model, old)
    expect_error("moved into shard", old.step)
    expect_error("full_state_dict", optimizer.state_dict)
    expect_error("make them before shard", lambda: optimizer.add_param_group({"params": []}))


ranks.main(__file__)
