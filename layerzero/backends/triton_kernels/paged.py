"""Paged attention: for decoding one program a sequence, key head and part of its keys; nothing is planned.

Few sequences are cut into parts, whose results a second launch joins, so that the device is full. The number
of parts follows from shapes alone: the host reads nothing, and a graph may hold both launches.
Source: the online softmax of arXiv 1805.02867; parts as in Flash-Decoding (Dao et al., 2023).
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.ops.attention.adapters import takes
from layerzero.ops.attention.arguments import PagedArgs
from layerzero.ops.kv_formats import scale_steps
from layerzero.ops.paged.splitting import parts_of

LOG2_E = 1.4426950408889634
# Tokens that a program reads at a time, its warps, and tiles on their way; then for codes of eight bits.
_NUMBERS, _CODES = (64, 4, 3), (64, 4, 4)
_LEAST_ROWS = 16  # of a product of matrix units: groups of fewer query heads are padded


@triton.jit
def find_page(table_ptr, tokens, inside, PAGE: tl.constexpr):
    """The pages of a sequence's tokens, and their places there."""
    return tl.load(table_ptr + tokens // PAGE, mask=inside, other=0).to(tl.int64), tokens % PAGE


@triton.jit
def attend_tile(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, page, place, inside, visible, best, weight, mixed,
    head, scale_log2, softcap,
    k_page, k_token, k_head, v_page, v_token, v_head, scale_page, scale_token, scale_head,
    WIDTH: tl.constexpr, CODES: tl.constexpr, BY_TOKEN: tl.constexpr, WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """What rows `q` know after a tile of keys: the largest score, the weights' sum, the mixed values.

    Only tokens `inside` are read, and each row counts those that are `visible` to it. Keys meet rows of codes
    as the codes that they are; values become numbers of type `WIDE`.
    """
    features = tl.arange(0, WIDTH)
    k = tl.load(
        k_ptr + (page * k_page + place * k_token + head * k_head)[:, None] + features[None, :],
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    v = tl.load(
        v_ptr + (page * v_page + place * v_token + head * v_head)[:, None] + features[None, :],
        mask=inside[:, None], other=0.0,
    )  # fmt: skip
    if CODES:
        k, v = k.to(q.dtype), v.to(WIDE)
    scores = tl.dot(q, tl.trans(k)) * scale_log2
    if BY_TOKEN:
        scales = page * scale_page + place * scale_token + head * scale_head
        scores *= tl.load(k_scale_ptr + scales, mask=inside, other=0.0)[None, :]
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen no key yet has no largest score: its weights stay 0.
    base = tl.where(largest > float("-inf"), largest, 0.0)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    weight = weight * shrink + tl.sum(weights, 1)
    if BY_TOKEN:
        weights *= tl.load(v_scale_ptr + scales, mask=inside, other=0.0)[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
    return largest, weight, mixed


@triton.jit(do_not_specialize=["tables_row"])  # a table of any width is one program
def _decode(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, best_ptr, weight_ptr, k_scale_ptr, v_scale_ptr,
    scale_log2,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, tables_row,
    scale_page, scale_token, scale_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, CODES: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lens_ptr + sequence)
    size = tl.cdiv(tl.cdiv(length, PARTS), TILE) * TILE
    first = part * size
    last = tl.minimum(first + size, length)
    rows, features = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = head * GROUP + rows
    q = tl.load(
        q_ptr + sequence * q_row + heads[:, None] * q_head + features[None, :],
        mask=(rows < GROUP)[:, None], other=0.0,
    )  # fmt: skip
    if CODES and not BY_TOKEN:  # one scale of a head's keys goes into the scores
        scale_log2 *= tl.load(k_scale_ptr + head * scale_head)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(first, last, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < last
        page, place = find_page(tables_ptr + sequence * tables_row, tokens, inside, PAGE)
        best, weight, mixed = attend_tile(
            q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, page, place, inside,
            inside[None, :], best, weight, mixed, head, scale_log2, 0.0,
            k_page, k_token, k_head, v_page, v_token, v_head, scale_page, scale_token, scale_head,
            WIDTH, CODES, BY_TOKEN, q_ptr.dtype.element_ty, False,
        )  # fmt: skip
    if CODES and not BY_TOKEN:
        mixed *= tl.load(v_scale_ptr + head * scale_head)
    offsets = (sequence * tl.num_programs(1) * GROUP + heads) * PARTS + part
    is_row = rows < GROUP
    if PARTS == 1:
        mixed = tl.where(weight[:, None] > 0.0, mixed / weight[:, None], 0.0)
    else:
        tl.store(best_ptr + offsets, best, mask=is_row)
        tl.store(weight_ptr + offsets, weight, mask=is_row)
    tl.store(
        out_ptr + offsets[:, None] * WIDTH + features[None, :], mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )  # fmt: skip


@triton.jit
def _join(
    parts_ptr, best_ptr, weight_ptr, out_ptr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts, features = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    best = tl.load(best_ptr + row * PARTS + parts)
    largest = tl.max(best, 0)
    shrink = tl.where(best > float("-inf"), tl.exp2(best - largest), 0.0)
    weight = tl.sum(tl.load(weight_ptr + row * PARTS + parts) * shrink, 0)
    mixed = tl.load(parts_ptr + (row * PARTS + parts)[:, None] * WIDTH + features[None, :])
    total = tl.sum(mixed * shrink[:, None], 0)
    out = tl.where(weight > 0.0, total / weight, 0.0)
    tl.store(out_ptr + row * WIDTH + features, out.to(out_ptr.dtype.element_ty))


@functools.cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; few elsewhere, where Triton is interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class PoolArgs(NamedTuple):
    """What kernels take of a pool of pages: scales, strides and constants."""

    scales: tuple[Tensor | None, Tensor | None]
    steps: tuple[int, ...]  # of keys, then of values, by page, token and head
    scale_steps: tuple[int, ...]
    key_heads: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, call: PagedArgs) -> PoolArgs:
        """Of one call."""
        token, head = (1, 2) if call.layout == "NHD" else (2, 1)
        pools = call.k_cache, call.v_cache
        return cls.of_pools(pools, (call.k_scale, call.v_scale), token, head, call.k_cache.shape[token])

    @classmethod
    def of_pools(
        cls, pools: tuple[Tensor, Tensor], scales: tuple[Tensor | None, Tensor | None], token: int, head: int,
        page: int,
    ) -> PoolArgs:  # fmt: skip
        """Of pools with tokens and heads at these axes; `page` is 0 where no table says what lies where."""
        k_scale, v_scale = scales
        steps = (0, 0, 0)
        if k_scale is not None:
            if v_scale is not None and v_scale.stride() != k_scale.stride():
                k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
            steps = scale_steps(k_scale, token, head)
        constants = {
            "PAGE": page, "CODES": k_scale is not None,
            "BY_TOKEN": k_scale is not None and k_scale.dim() > 1,
        }  # fmt: skip
        strides = tuple(pool.stride(axis) for pool in pools for axis in (0, token, head))
        return cls((k_scale, v_scale), strides, steps, pools[0].shape[head], constants)


def rows_of_tables(block_tables: Tensor) -> Tensor:
    """Tables whose entries lie behind each other."""
    return block_tables if block_tables.stride(-1) == 1 else block_tables.contiguous()


def scale_log2(scale: float | None, width: int) -> float:
    """What scores are multiplied by, for powers of two."""
    return (width**-0.5 if scale is None else scale) * LOG2_E


@takes(PagedArgs)
def paged_attention(call: PagedArgs) -> Tensor:
    """One query token a sequence; of the options only the scales and the layout are more than defaults."""
    q, tables = call.q, rows_of_tables(call.block_tables)
    sequences, heads, width = q.shape
    pool = PoolArgs.of(call)
    most_tokens = tables.shape[1] * pool.constants["PAGE"]
    parts = parts_of(sequences * pool.key_heads, most_tokens, processors(q.device))
    out = torch.empty((sequences, heads, width), dtype=q.dtype, device=q.device)
    mixed, best, weight = out, out, out
    if parts > 1:
        mixed = torch.empty((sequences, heads, parts, width), dtype=torch.float32, device=q.device)
        best, weight = torch.empty((2, sequences, heads, parts), dtype=torch.float32, device=q.device)
    group = heads // pool.key_heads
    tile, warps, stages = _NUMBERS if call.k_scale is None else _CODES
    _decode[(sequences, pool.key_heads, parts)](
        q, call.k_cache, call.v_cache, tables, call.seq_lens.contiguous(), mixed, best, weight, *pool.scales,
        scale_log2(call.scale, width), q.stride(0), q.stride(1), *pool.steps, tables.stride(0),
        *pool.scale_steps,
        GROUP=group, ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), WIDTH=width, TILE=tile,
        PARTS=parts, **pool.constants, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        join_parts(mixed, best, weight, out)
    return out


def join_parts(mixed: Tensor, best: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write to `out` (B, H, D) what its parts (B, H, parts, D) are together, by their `best` and `weight`."""
    _join[(best.shape[0] * best.shape[1],)](
        mixed, best, weight, out, WIDTH=mixed.shape[3], PARTS=mixed.shape[2], num_warps=2
    )
