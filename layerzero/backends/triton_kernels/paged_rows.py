"""Attention of any rows over pages: prompts, pieces of prompts and decoding in one launch that plans nothing.

The kernel takes keys without pages, too: `dense` gives it those that lie behind each other. One program has a
tile of a sequence's queries, with all query heads of one key head. How many tiles there are follows from
shapes alone, and each finds its sequence in the offsets: the host reads nothing, and a graph may hold the
launch.
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

from layerzero.backends.triton_kernels.paged import (
    LOG2_E,
    PoolArgs,
    attend_tile,
    find_page,
    rows_of_tables,
    scale_log2,
)
from layerzero.ops.attention.adapters import takes
from layerzero.ops.attention.arguments import PagedArgs

LN_2 = tl.constexpr(1.0 / LOG2_E)
# Rows of queries and heads that a program has, keys that it reads at a time, its warps, tiles on their way.
_LARGE, _SMALL = (64, 64, 4, 3), (64, 32, 4, 2)  # for heads of up to 128 numbers, and wider ones


@triton.jit
def start_of(starts_ptr, index, length):
    """Where the rows of sequence `index` begin: by its offset, or behind others of one `length`."""
    return index.to(tl.int64) * length if starts_ptr is None else tl.load(starts_ptr + index).to(tl.int64)


@triton.jit
def find_tile(starts_ptr, program, sequences, length, ROWS: tl.constexpr):
    """(sequence, where its rows begin, how many it has, the first of them that is this program's).

    Sequence b's tiles begin at starts[b] // ROWS + b: the last that does not begin later is found.
    """
    low = program * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = start_of(starts_ptr, middle, length) // ROWS + middle
        if begins <= program:
            low = middle
        else:
            high = middle
    begin = start_of(starts_ptr, low, length)
    count = (start_of(starts_ptr, low + 1, length) - begin).to(tl.int32)
    first = ((program - begin // ROWS - low) * ROWS).to(tl.int32)
    return low, begin, count, first


@triton.jit
def _keys_of(lens_ptr, starts_ptr, sequence, length):
    """(how many keys a sequence has, where they begin on their axis)."""
    begin = sequence.to(tl.int64) * 0
    if lens_ptr is not None:
        count = tl.load(lens_ptr + sequence)
    else:
        count = start_of(starts_ptr, sequence + 1, length) - start_of(starts_ptr, sequence, length)
        if starts_ptr is not None:
            begin = start_of(starts_ptr, sequence, length)
    return count.to(tl.int32), begin


@triton.jit(do_not_specialize=["tables_row", "sequences", "q_len", "k_len", "left_window", "right_window"])
def attend(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr, starts_k_ptr, out_ptr, lse_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, scale_log2, softcap, sequences, q_len, k_len,
    left_window, right_window,
    q_batch, q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, tables_row,
    scale_page, scale_token, scale_head, out_batch, out_row, out_head,
    lse_batch, lse_row, lse_head, q_scale_batch, q_scale_row, q_scale_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PAGE: tl.constexpr, CODES: tl.constexpr,
    BY_TOKEN: tl.constexpr, WIDE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one key head: over pages, keys at offsets, or keys of sequences of one length."""
    program, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, begin, count, first = find_tile(starts_ptr, program, sequences, q_len, QUERIES)
    if first >= count:
        return
    # Sequences of one length are the places of an axis; all others lie behind each other on one.
    sequence = low.to(tl.int64)
    length, begin_k = _keys_of(lens_ptr, starts_k_ptr, low, k_len)
    if starts_ptr is not None:
        sequence *= 0
    else:
        begin *= 0
    rows, features = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    queries = first + rows // GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < count)
    heads = head * GROUP + rows % GROUP
    places = begin + queries
    q = tl.load(
        q_ptr + (sequence * q_batch + places * q_row + heads * q_head)[:, None] + features[None, :],
        mask=is_row[:, None], other=0.0,
    )  # fmt: skip
    if CODES and not BY_TOKEN:  # one scale of a head's keys goes into the scores
        scale_log2 *= tl.load(k_scale_ptr + head * scale_head)
    if q_scale_ptr is not None:
        steps = sequence * q_scale_batch + places * q_scale_row + heads * q_scale_head
        scale_log2 *= tl.load(q_scale_ptr + steps, mask=is_row, other=0.0)[:, None]
    # The last query is at the last key.
    position = length - count + queries
    reach = tl.full((ROWS,), 0, tl.int32) + length
    start_key, last = length * 0, length
    if RIGHT:
        reach = tl.minimum(reach, position + right_window + 1)
        last = tl.minimum(length, length - count + first + QUERIES + right_window)
    if LEFT:
        start_key = tl.maximum(length - count + first - left_window, 0) // TILE * TILE
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(start_key, last, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < last
        visible = tokens[None, :] < tl.minimum(reach, last)[:, None]
        if LEFT:
            visible = visible & (tokens[None, :] >= (position - left_window)[:, None])
        if PAGE > 0:
            page, place = find_page(tables_ptr + low.to(tl.int64) * tables_row, tokens, inside, PAGE)
        else:
            page, place = sequence, begin_k + tokens
        best, weight, mixed = attend_tile(
            q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, page, place, inside, visible,
            best, weight, mixed, head, scale_log2, softcap,
            k_page, k_token, k_head, v_page, v_token, v_head, scale_page, scale_token, scale_head,
            WIDTH, CODES, BY_TOKEN, WIDE, SOFTCAP,
        )  # fmt: skip
    if CODES and not BY_TOKEN:
        mixed *= tl.load(v_scale_ptr + head * scale_head)
    total = tl.where(weight == 0.0, 1.0, weight)  # of a row that sees no key
    mixed /= total[:, None]
    steps = sequence * out_batch + places * out_row + heads * out_head
    tl.store(
        out_ptr + steps[:, None] + features[None, :], mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )  # fmt: skip
    if lse_ptr is not None:
        lse = (best + tl.log2(total)) * LN_2
        steps = sequence * lse_batch + places * lse_row + heads * lse_head
        tl.store(lse_ptr + steps, lse, mask=is_row)


def tile_of(group: int, width: int) -> tuple[dict[str, int], int]:
    """Constants and warps of a launch for so many query heads a key head, and the queries of a program."""
    rows, tile, warps, stages = _LARGE if width <= 128 else _SMALL
    rows = max(rows, triton.next_power_of_2(group))
    cut = {
        "GROUP": group, "ROWS": rows, "QUERIES": rows // group, "WIDTH": width, "TILE": tile,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return cut, rows // group


@takes(PagedArgs)
def paged_attention(call: PagedArgs) -> Tensor:
    """Any number of query tokens a sequence; window, softcap and return_lse are their defaults."""
    q, tables, cu_seqlens_q = call.q, rows_of_tables(call.block_tables), call.cu_seqlens_q
    rows, heads, width = q.shape
    sequences = call.seq_lens.shape[0]
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(sequences + 1, dtype=torch.int32, device=q.device)
    pool = PoolArgs.of(call)
    cut, queries = tile_of(heads // pool.key_heads, width)
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    attend[(rows // queries + sequences, pool.key_heads)](
        q, call.k_cache, call.v_cache, tables, call.seq_lens.contiguous(), cu_seqlens_q.contiguous(), None,
        out, None, None, *pool.scales, scale_log2(call.scale, width), 0.0, sequences, 0, 0, 0, 0, 0,
        q.stride(0), q.stride(1), *pool.steps, tables.stride(0), *pool.scale_steps, 0,
        out.stride(0), out.stride(1), *[0] * 6, LEFT=False, RIGHT=call.is_causal,
        WIDE=getattr(tl, str(q.dtype).removeprefix("torch.")), SOFTCAP=False, **cut, **pool.constants,
    )  # fmt: skip
    return out
