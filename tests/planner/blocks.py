"""Blocks that the tests of the planner share: small layers on the CPU, as users write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz

WIDTH, HEADS, KEY_HEADS, HEAD, INNER = 64, 4, 2, 16, 96


def weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Weights of a size at which rows keep their variance."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    scaled: Tensor = numbers * shape[-1] ** -0.5
    return scaled.to(dtype)


def rows(count: int = 3, width: int = WIDTH, dtype: torch.dtype = torch.float32, seed: int = 7) -> Tensor:
    """Rows of unit variance."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def feed_forward(dtype: torch.dtype = torch.float32) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A residual sum, its norm, and a gated block of three products, torch between them."""
    gate, up = (weight(INNER, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2))
    down = weight(WIDTH, INNER, dtype=dtype, seed=3)
    scale = torch.rand(WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        normed = lz.sync.rms_norm(total, scale)
        hidden = F.silu(lz.sync.linear(normed, gate)) * lz.sync.linear(normed, up)
        return lz.sync.linear(hidden, down), total

    return block


def decoder(dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A decoder layer over pages, one token a sequence, and arguments for it."""
    scale = torch.ones(WIDTH, dtype=dtype)
    q_weight, k_weight, v_weight = (
        weight(heads * HEAD, WIDTH, dtype=dtype, seed=seed)
        for seed, heads in ((1, HEADS), (2, KEY_HEADS), (3, KEY_HEADS))
    )
    out = weight(WIDTH, HEADS * HEAD, dtype=dtype, seed=4)
    cos, sin = lz.rope_tables(HEAD, 64)
    k_cache, v_cache = (torch.zeros(8, 16, KEY_HEADS, HEAD, dtype=dtype) for _ in range(2))
    mlp = feed_forward(dtype)

    def layer(x: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        normed = lz.sync.rms_norm(x, scale)
        q = lz.sync.linear(normed, q_weight).view(-1, HEADS, HEAD)
        k = F.linear(normed, k_weight).view(-1, KEY_HEADS, HEAD)
        v = F.linear(normed, v_weight).view(-1, KEY_HEADS, HEAD)
        q, k = lz.sync.rope(q, k, positions, cos, sin)
        lz.sync.append_kv(k, v, k_cache, v_cache, slots)
        mixed = lz.sync.paged_attention(q, k_cache, v_cache, tables, lengths)
        projected = F.linear(mixed.reshape(-1, HEADS * HEAD), out)
        output, total = mlp(projected, x)
        return output + total

    positions = torch.tensor([4, 0, 9])
    tables = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    slots = tables[:, 0].long() * 16 + positions
    return layer, (rows(dtype=dtype), positions, slots, tables, (positions + 1).int())
