"""Paged attention of any rows: prompts, pieces of prompts and decoding in one launch that plans nothing.

One program has a tile of a sequence's queries, with all query heads of one key head. How many tiles there are
follows from shapes alone, and each finds its sequence in the offsets: the host reads nothing, and a graph may
hold the launch.
Source: the online softmax of arXiv 1805.02867.
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.backends.triton_kernels.paged import PoolArguments, attend_tile, rows_of_tables, scale_log2
from layerzero.ops.attention.adapters import takes
from layerzero.ops.attention.arguments import PagedArgs

# Rows of queries and heads that a program has, keys that it reads at a time, its warps, tiles on their way.
_LARGE, _SMALL = (64, 64, 4, 3), (64, 32, 4, 2)  # for heads of up to 128 numbers, and wider ones


@triton.jit(do_not_specialize=["tables_row", "sequences"])
def _attend(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr, out_ptr, k_scale_ptr, v_scale_ptr,
    scale_log2, sequences,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, tables_row,
    scale_page, scale_token, scale_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, PAGE: tl.constexpr, CODES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Sequence b's tiles begin at starts[b] // QUERIES + b: find the last that does not begin later.
    low = program * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(starts_ptr + middle) // QUERIES + middle
        if begins <= program:
            low = middle
        else:
            high = middle
    begin = tl.load(starts_ptr + low)
    count = (tl.load(starts_ptr + low + 1) - begin).to(tl.int32)
    first = ((program - begin // QUERIES - low) * QUERIES).to(tl.int32)
    if first >= count:
        return
    length = tl.load(lens_ptr + low).to(tl.int32)
    rows, features = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    queries = first + rows // GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < count)
    heads = head * GROUP + rows % GROUP
    places = begin.to(tl.int64) + queries
    q = tl.load(
        q_ptr + (places * q_row + heads * q_head)[:, None] + features[None, :],
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    if CODES and not BY_TOKEN:  # one scale of a head's keys goes into the scores
        scale_log2 *= tl.load(k_scale_ptr + head * scale_head)
    # The last query is at the last key.
    reach = length - count + queries + 1 if CAUSAL else tl.full((ROWS,), 0, tl.int32) + length
    last = tl.minimum(length, length - count + first + QUERIES) if CAUSAL else length
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    table_ptr = tables_ptr + low.to(tl.int64) * tables_row
    for start in range(0, last, TILE):
        tokens = start + tl.arange(0, TILE)
        best, weight, mixed = attend_tile(
            q, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr, tokens, tokens < last,
            tokens[None, :] < tl.minimum(reach, last)[:, None], best, weight, mixed, head, scale_log2,
            k_page, k_token, k_head, v_page, v_token, v_head, scale_page, scale_token, scale_head,
            WIDTH, PAGE, CODES, BY_TOKEN,
        )  # fmt: skip
    if CODES and not BY_TOKEN:
        mixed *= tl.load(v_scale_ptr + head * scale_head)
    mixed = tl.where(weight[:, None] > 0.0, mixed / weight[:, None], 0.0)
    places = (places * tl.num_programs(1) * GROUP + heads) * WIDTH
    tl.store(
        out_ptr + places[:, None] + features[None, :], mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )  # fmt: skip


@takes(PagedArgs)
def paged_attention(call: PagedArgs) -> Tensor:
    """Any number of query tokens a sequence; window, softcap and return_lse are their defaults."""
    q, tables, cu_seqlens_q = call.q, rows_of_tables(call.block_tables), call.cu_seqlens_q
    rows, heads, width = q.shape
    sequences = call.seq_lens.shape[0]
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(sequences + 1, dtype=torch.int32, device=q.device)
    pool = PoolArguments.of(call)
    group = heads // pool.key_heads
    most, tile, warps, stages = _LARGE if width <= 128 else _SMALL
    most = max(most, triton.next_power_of_2(group))
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    _attend[(rows // (most // group) + sequences, pool.key_heads)](
        q, call.k_cache, call.v_cache, tables, call.seq_lens, cu_seqlens_q, out, *pool.scales,
        scale_log2(call.scale, width), sequences, q.stride(0), q.stride(1), *pool.steps, tables.stride(0),
        *pool.scale_steps,
        GROUP=group, ROWS=most, QUERIES=most // group, WIDTH=width, TILE=tile, CAUSAL=call.is_causal,
        **pool.constants, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
