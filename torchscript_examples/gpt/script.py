# SPDX-License-Identifier: BSD-3-Clause
"""Writes the model of gpt.h as a TorchScript file for `gpt_train --script`. Usage: script.py OUT.pt WIDTH HEADS LAYERS CONTEXT

Nothing here knows of trueshard: any scripted module that maps int64 [batch, length] to logits [batch, length, 256] will do.
"""

import sys

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, context: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)  # tied, and read outside any submodule


if __name__ == "__main__":
    torch.manual_seed(1)
    model = Gpt(*map(int, sys.argv[2:6]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    torch.jit.script(model).save(sys.argv[1])
