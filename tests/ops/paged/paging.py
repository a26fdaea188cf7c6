"""Random paged calls, and attention in float64 one score at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.op import Args
from layerzero.ops.paged.attention import PAGED_ATTENTION


def one_query(
    q: Tensor, keys: Tensor, values: Tensor, seen: Sequence[int], scale: float, cap: float | None
) -> tuple[Tensor, float]:
    """One query (D,) against keys (S, D): the result in float64 and the log of the denominator."""
    scores = []
    for j in seen:
        s = float(q.double() @ keys[j].double()) * scale
        scores.append(s if cap is None else cap * math.tanh(s / cap))
    total = sum(math.exp(s) for s in scores)
    out = torch.zeros(values.shape[1], dtype=torch.float64)
    for s, j in zip(scores, seen, strict=True):
        out += math.exp(s) / total * values[j].double()
    return out, math.log(total) if scores else -math.inf


def visible(position: int, length: int, causal: bool, window: tuple[int, int] | None) -> list[int]:
    """The keys that the query on the diagonal's key `position` sees."""
    left, right = window or (-1, -1)
    right = 0 if causal else right
    low = 0 if left < 0 else max(0, position - left)
    high = length if right < 0 else min(length, position + right + 1)
    return list(range(low, high))


def oracle(
    q: Tensor, sequences: Sequence[tuple[int, Tensor, Tensor]], causal: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """`q` (T, Hq, D) against sequences of (queries, keys (S, Hk, D), values): (T, Hq, Dv) and LSE (T, Hq)."""
    group = q.shape[1] // sequences[0][1].shape[1]
    scale = options.get("scale") or q.shape[2] ** -0.5
    out = torch.zeros((*q.shape[:2], sequences[0][2].shape[2]), dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    row = 0
    for count, keys, values in sequences:
        for i in range(count):
            seen = visible(keys.shape[0] - count + i, keys.shape[0], causal, options.get("window"))
            for h in range(q.shape[1]):
                k, v = keys[:, h // group], values[:, h // group]
                out[row, h], lse[row, h] = one_query(q[row, h], k, v, seen, scale, options.get("softcap"))
            row += 1
    return out, lse


def paged_call(
    queries: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    page_size: int = 8,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    seed: int = 0,
    decode: bool = False,
    **options: Any,
) -> tuple[Args, list[tuple[int, Tensor, Tensor]]]:
    """A paged call over shuffled pages, what stands behind the lengths poisoned, and its dense sequences."""
    random = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    needed = [-(-n // page_size) for n in lengths]
    width = max([*needed, 0]) + 1
    order = torch.randperm(sum(needed) + 3, generator=random).tolist()
    pools = [torch.full((len(order), page_size, heads[1], w), math.nan, dtype=dtype) for w in widths]
    table = torch.full((len(lengths), width), -7, dtype=index)
    dense = []
    for row, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        mine = [order.pop() for _ in range(needed[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=index)
        tokens = [rand(length, heads[1], w) for w in widths]
        for pool, given in zip(pools, tokens, strict=True):
            for j in range(length):
                pool[mine[j // page_size], j % page_size] = given[j]
        dense.append((count, *tokens))
    if layout == "HND":
        pools = [pool.transpose(1, 2).contiguous() for pool in pools]
    offsets = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=index)
    q = rand(sum(queries), heads[0], widths[0])
    lens = torch.tensor(lengths, dtype=index)
    cu = None if decode else offsets
    args = PAGED_ATTENTION.build(q, *pools, table, lens, cu_seqlens_q=cu, layout=layout, **options)[1]
    return args, dense  # type: ignore[return-value]
