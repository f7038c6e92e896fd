# SPDX-License-Identifier: BSD-3-Clause
"""shard(): ZeRO-1, 2 and 3 for torch.nn.Module and torch.jit.ScriptModule, with the engine that C++ users have.

    optimizer = trueshard.shard(model, torch.optim.AdamW(model.parameters(), 1e-3), stage=3)
    loss_of(model, batch).backward()
    trueshard.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()

The optimizer's step is libtorch's (torch::optim), whose last bits may differ from those of Python's torch.optim.
Every rank makes the same calls in the same order; errors are the same on all ranks.
"""

import contextlib
import enum
import math

import torch
import torch.distributed as dist

from trueshard import _C

__all__ = ["ShardedGradScaler", "ShardedOptimizer", "Stage", "clip_grad_norm_", "full_state_dict", "shard"]


class Stage(enum.IntEnum):
    """What is sharded over the ranks. The bits of a run do not depend on it."""

    REPLICATED = 0
    ZERO1 = 1
    ZERO2 = 2
    ZERO3 = 3


# What torch::optim has of each optimizer's options; an option that changes the step and is not here is refused.
_OPTIONS = {
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
}
_KINDS = {getattr(torch.optim, name): name for name in _OPTIONS}
_NORMS = (torch.nn.modules.batchnorm._NormBase,)


def _plain(value):
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else value if isinstance(value, bool) else float(value)


def _kind_of(optimizer):
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise TypeError(
            f"trueshard shard: the optimizer is {type(optimizer).__name__}; expected torch.optim's {', '.join(_OPTIONS)} "
            "itself (subclasses may step differently)"
        )
    for group in optimizer.param_groups:
        if group.get("maximize"):
            raise ValueError("trueshard shard: maximize=True is not supported; negate the loss")
        if kind == "Adam" and group.get("decoupled_weight_decay"):
            raise ValueError("trueshard shard: Adam with decoupled_weight_decay=True; use torch.optim.AdamW")
    # Adagrad makes its state when it is built.
    if any(state.get("step", 0) != 0 for state in optimizer.state.values()) or (kind != "Adagrad" and optimizer.state):
        raise ValueError("trueshard shard: the optimizer has stepped already; call shard() before its first step")
    return kind


def _is_norm(module):
    if isinstance(module, torch.jit.ScriptModule):
        name = getattr(module, "original_name", "")
        return "BatchNorm" in name or "InstanceNorm" in name
    return isinstance(module, _NORMS)


def _listing(module):
    modules = dict(module.named_modules())
    return _C.ModuleListing(
        list(module.named_parameters(remove_duplicate=False))
        if not isinstance(module, torch.jit.ScriptModule)
        else list(module.named_parameters()),
        list(module.named_buffers()),
        list(modules),
        [name for name, child in modules.items() if _is_norm(child)],
    )


def _moved(*_, **__):
    raise RuntimeError("trueshard: this optimizer was moved into shard(); use the ShardedOptimizer that shard() returned")


def shard(module, optimizer, group=None, **options):
    """Shards `module` over the ranks of `group` (a group of backend "trueshard"; None: the default one). Collective.

    `optimizer`: a torch.optim.Adam, AdamW, SGD, RMSprop or Adagrad over the module's parameters that has not stepped yet;
    it is taken over. `options`: stage (Stage or its number, default ZERO2), param_dtype, full_precision_modules, units,
    unit_bytes, resident_bytes, prefetch_units, bucket_bytes, overlap, gradient_divide_factor, skip_nonfinite_steps,
    low_precision_master, share_parameters; see trueshard/shard_options.h. All ranks start with rank 0's parameters and buffers.
    """
    known = ("stage", "param_dtype", "full_precision_modules", "units", "unit_bytes", "resident_bytes", "prefetch_units",
             "bucket_bytes", "overlap", "gradient_divide_factor", "skip_nonfinite_steps", "low_precision_master",
             "share_parameters")
    for name in options:
        if name not in known:
            raise TypeError(f"trueshard shard: unknown option '{name}'; expected one of {', '.join(known)}")
    if "stage" in options:
        options["stage"] = int(options["stage"])
    kind = _kind_of(optimizer)
    groups = [(list(g["params"]), {key: _plain(g[key]) for key in _OPTIONS[kind]}) for g in optimizer.param_groups]
    inner = _C.shard(_listing(module), kind, groups, group if group is not None else dist.group.WORLD, options)
    result = ShardedOptimizer(inner, kind, optimizer)
    optimizer.step = _moved
    optimizer.zero_grad = _moved
    return result


class ShardedOptimizer(torch.optim.Optimizer):
    """What shard() returns. `param_groups` holds this rank's fp32 shards; learning-rate schedulers work on it."""

    def __init__(self, inner, kind, original):
        self._inner, self._kind = inner, kind
        groups = [{**group, "params": inner.shards(i)} for i, group in enumerate(original.param_groups)]
        super().__init__(groups, dict(original.defaults))
        self._complete = True

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._push_options()
        self._inner.step()
        return loss

    def _push_options(self):
        for i, group in enumerate(self.param_groups):
            self._inner.set_options(i, {key: _plain(group[key]) for key in _OPTIONS[self._kind]})

    def zero_grad(self, set_to_none=True):
        self._inner.zero_grad(set_to_none)

    def finish_reduction(self):
        """Ends the reduction of all passes so far; then the shards' grad is the mean over all leaves. Collective."""
        self._inner.finish_reduction()

    def empty_pass(self):
        """Counts as a backward pass in which this rank has no gradient at all (uneven inputs)."""
        self._inner.empty_pass()

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes inside add up locally in fp32 and join the next synchronised one."""
        guard = _C.NoSyncGuard(self._inner)
        try:
            yield
        finally:
            del guard

    @contextlib.contextmanager
    def full_parameters(self):
        """Inside, every parameter is whole and shows its fp32 master, for reading and writing. Collective.

        All ranks must write the same values; the yielded object's broadcast(source) spreads one rank's.
        """
        guard = _C.FullParametersGuard(self._inner)
        try:
            yield guard
        finally:
            del guard

    def metrics(self):
        return self._inner.metrics()

    def add_param_group(self, param_group):
        if getattr(self, "_complete", False):
            raise RuntimeError("trueshard: groups can not be added to a sharded optimizer; make them before shard()")
        super().add_param_group(param_group)

    def state_dict(self):
        raise RuntimeError("trueshard: a state_dict would hold this rank's shards only; use trueshard.full_state_dict(optimizer)")

    def load_state_dict(self, state_dict):
        raise RuntimeError("trueshard: a sharded optimizer can not load a state_dict")


def full_state_dict(optimizer, rank0_only=False):
    """Name -> whole fp32 parameter or buffer, under the untouched module's names. Collective."""
    return dict(optimizer._inner.full_state_dict(rank0_only))


def clip_grad_norm_(optimizer, max_norm, norm_type=2.0, error_if_nonfinite=False):
    """One norm over all ranks' gradients of one or several sharded optimizers, the same bits everywhere; clips to it."""
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    norm_type = math.inf if norm_type == "inf" else float(norm_type)
    return _C.clip_grad_norm_([o._inner for o in optimizers], float(max_norm), norm_type, error_if_nonfinite)


class ShardedGradScaler:
    """torch.amp.GradScaler's rules with one decision for all ranks; for optimizers from shard()."""

    def __init__(self, group=None, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        group = group if group is not None else dist.group.WORLD
        self._inner = _C.ShardedGradScaler(group, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def scale(self, loss):
        return self._inner.scale(loss)

    def unscale_(self, optimizer):
        self._inner.unscale_(optimizer._inner)

    def step(self, optimizer):
        """True when the step was taken."""
        optimizer._push_options()
        taken = self._inner.step(optimizer._inner)
        if taken:
            optimizer._opt_called = True  # learning-rate schedulers warn where no step came before theirs
        return taken

    def update(self):
        self._inner.update()

    def get_scale(self):
        return self._inner.get_scale()

    def skipped_steps(self):
        return self._inner.skipped_steps()
