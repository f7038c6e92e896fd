# SPDX-License-Identifier: BSD-3-Clause
"""What the reductions must give, computed the slow way (docs/numerics.md, section 1), and nets to train."""

import torch


def tree_sum(leaves, combine=torch.add):
    """The canonical tree: split at the largest power of two below the number of leaves; fp32 (fp64 stays), no rounding."""
    if len(leaves) == 1:
        leaf = leaves[0]
        return leaf if leaf.dtype == torch.float64 else leaf.float()
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return combine(tree_sum(leaves[:half], combine), tree_sum(leaves[half:], combine))


def tree_mean(leaves):
    return tree_sum(leaves) / len(leaves)


def same_bits(a, b):
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch(rank, step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=generator).to(dtype)


def loss_of(model, x):
    return (model(x) ** 2).sum()


def leaves_of(world, step=0, dtype=torch.float32, model=None):
    """Every rank's gradients of one pass, by parameter name, from the plain net in this process."""
    model = model if model is not None else net(dtype)
    leaves = {name: [] for name, _ in model.named_parameters()}
    for rank in range(world):
        model.zero_grad()
        loss_of(model, batch(rank, step, dtype)).backward()
        for name, parameter in model.named_parameters():
            leaves[name].append(parameter.grad.clone())
    model.zero_grad()
    return leaves
