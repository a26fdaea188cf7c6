"""Latent attention over pages: one program a query, up to 64 of its heads and a part of its keys.

A second launch joins a row's parts, one behind the other. How many there are follows from shapes alone: as
many as fill the device, or (`in_order`) one for each 512 tokens whatever the batch, so that a row's bits are
its own. The host reads nothing, and a graph may hold both launches.
Source: arXiv 2405.04434 (the absorbed form); parts as in Flash-Decoding (Dao et al., 2023).
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from layerzero.backends.triton_kernels.paged import LOG2_E, find_page, processors, rows_of_tables
from layerzero.backends.triton_kernels.paged_rows import LN_2, find_tile
from layerzero.ops.attention.adapters import Result, takes
from layerzero.ops.attention.arguments import MlaArgs
from layerzero.ops.paged.splitting import LEAST_PART, parts_of

# Heads that a program has at the most, tokens that it reads at a time, its warps, and tiles on their way.
_CUT = (64, 32, 8, 2)
_PART = 512  # tokens of a part in order
_MOST_BYTES = 1 << 26  # of parts in order that lie in memory at a time
_JOINED = 8  # parts that are read at a time


@triton.jit(
    do_not_specialize=["tables_row", "sequences", "heads", "first_row", "rows", "parts", "least_part"]
)
def _attend(
    q_ptr, q_pe_ptr, ckv_ptr, kpe_ptr, tables_ptr, lens_ptr, starts_ptr, mixed_ptr, best_ptr, weight_ptr,
    ckv_scale_ptr, kpe_scale_ptr, scale_log2, sequences, heads, first_row, rows, parts, least_part,
    q_row, q_head, q_pe_row, q_pe_head, ckv_page, ckv_token, kpe_page, kpe_token, tables_row,
    ckv_scale_page, ckv_scale_token, kpe_scale_page, kpe_scale_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Rows first_row to first_row + rows: their one part as it is divided (ALONE), or what each part knows.

    `best_ptr` has the log-sum-exp of rows ALONE, or nothing.
    """
    low, begin, count, query = find_tile(starts_ptr, first_row + tl.program_id(0), sequences, 1, 1)
    place = begin + query
    if query >= count or place < first_row or place >= first_row + rows:
        return
    length = tl.load(lens_ptr + low).to(tl.int32)
    last = length - count + query + 1 if CAUSAL else length
    size = tl.maximum(tl.cdiv(tl.cdiv(length, parts), TILE) * TILE, least_part)
    first = tl.program_id(2) * size
    last = tl.minimum(first + size, last)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    features, turned = tl.arange(0, WIDTH), tl.arange(0, ROTARY)
    is_head = head < heads
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    offsets = ((place - first_row) * heads + head) * parts + tl.program_id(2)
    if not ALONE and first >= last:  # a part without keys: the join reads no more of it
        tl.store(best_ptr + offsets, best, mask=is_head)
        return
    q = tl.load(
        q_ptr + place * q_row + (head * q_head)[:, None] + features[None, :], mask=is_head[:, None], other=0.0
    )
    q_pe_ptr += place * q_pe_row
    q_pe = tl.load(q_pe_ptr + (head * q_pe_head)[:, None] + turned[None, :], mask=is_head[:, None], other=0.0)
    weight = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, WIDTH), tl.float32)
    for start in range(first, last, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < last
        page, slot = find_page(tables_ptr + low.to(tl.int64) * tables_row, tokens, inside, PAGE)
        places = (page * ckv_page + slot * ckv_token)[:, None] + features[None, :]
        ckv = tl.load(ckv_ptr + places, mask=inside[:, None], other=0.0).to(q.dtype)
        turned_places = (page * kpe_page + slot * kpe_token)[:, None] + turned[None, :]
        kpe = tl.load(kpe_ptr + turned_places, mask=inside[:, None], other=0.0).to(q.dtype)
        scores, scores_pe = tl.dot(q, tl.trans(ckv)), tl.dot(q_pe, tl.trans(kpe))
        if ckv_scale_ptr is not None:
            scale_places = page * ckv_scale_page + slot * ckv_scale_token
            scale = tl.load(ckv_scale_ptr + scale_places, mask=inside, other=0.0)
            scale_places = page * kpe_scale_page + slot * kpe_scale_token
            scores *= scale[None, :]
            scores_pe *= tl.load(kpe_scale_ptr + scale_places, mask=inside, other=0.0)[None, :]
        scores = tl.where(inside[None, :], (scores + scores_pe) * scale_log2, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - largest[:, None]), tl.exp2(best - largest)
        weight, best = weight * shrink + tl.sum(weights, 1), largest
        if ckv_scale_ptr is not None:
            weights *= scale[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(q.dtype), ckv)
    if ALONE:
        total = tl.where(weight == 0.0, 1.0, weight)  # of a row that sees no key
        mixed /= total[:, None]
        best = (best + tl.log2(total)) * LN_2
    else:
        tl.store(weight_ptr + offsets, weight, mask=is_head)
    if best_ptr is not None:
        tl.store(best_ptr + offsets, best, mask=is_head)
    steps = offsets.to(tl.int64)[:, None] * WIDTH + features[None, :]
    tl.store(mixed_ptr + steps, mixed.to(mixed_ptr.dtype.element_ty), mask=is_head[:, None])


@triton.jit(do_not_specialize=["first_row", "parts"])
def _join(
    mixed_ptr, best_ptr, weight_ptr, out_ptr, lse_ptr, first_row, parts,
    WIDTH: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """What a row's parts are together, the first of them first: parts without keys change no bit."""
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, WIDTH)
    best = tl.full((), float("-inf"), tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, parts, JOINED):
        part = start + tl.arange(0, JOINED)
        bests = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
        some = bests != float("-inf")
        largest = tl.maximum(best, tl.max(bests, 0))
        base = tl.where(largest > float("-inf"), largest, 0.0)
        shrink, shrinks = tl.exp2(best - base), tl.exp2(bests - base)
        weights = tl.load(weight_ptr + row * parts + part, mask=some, other=0.0)
        places = (row * parts + part)[:, None] * WIDTH + features[None, :]
        values = tl.load(mixed_ptr + places, mask=some[:, None], other=0.0)
        weight = weight * shrink + tl.sum(weights * shrinks, 0)
        mixed = mixed * shrink + tl.sum(values * shrinks[:, None], 0)
        best = largest
    total = tl.where(weight == 0.0, 1.0, weight)
    row += first_row
    tl.store(out_ptr + row * WIDTH + features, (mixed / total).to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (best + tl.log2(total)) * LN_2)


def _run(call: MlaArgs, parts: int, least_part: int, rows_at_once: int, alone: bool) -> Result:
    """Attend `rows_at_once` queries at a time, each in `parts` of `least_part` tokens or more.

    Only a part that is `alone` is divided where it is made.
    """
    q, ckv, kpe, tables = call.q_nope, call.ckv_cache, call.kpe_cache, rows_of_tables(call.block_tables)
    (tokens, heads, width), sequences = q.shape, call.seq_lens.shape[0]
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if call.return_lse else None
    mixed, best, weight = out, lse, None
    if not alone:
        kept = min(rows_at_once, tokens), heads, parts
        mixed = torch.empty((*kept, width), dtype=torch.float32, device=q.device)
        best, weight = torch.empty((2, *kept), dtype=torch.float32, device=q.device)
    scales = [call.ckv_scale, call.kpe_scale]
    steps = [(0, 0) if scale is None or scale.dim() == 0 else scale.stride() for scale in scales]
    starts = None if call.cu_seqlens_q is None else call.cu_seqlens_q.contiguous()
    lens = call.seq_lens.contiguous()
    at_once, (_, tile, warps, stages) = _heads_at_once(heads), _CUT
    for first in range(0, tokens, rows_at_once):
        rows = min(rows_at_once, tokens - first)
        _attend[(rows + sequences, triton.cdiv(heads, at_once), parts)](
            q, call.q_pe, ckv, kpe, tables, lens, starts, mixed, best, weight, *scales,
            call.scale * LOG2_E, sequences, heads, first, rows, parts, least_part,
            *q.stride()[:2], *call.q_pe.stride()[:2], *ckv.stride()[:2], *kpe.stride()[:2],
            tables.stride(0), *steps[0], *steps[1],
            HEADS=at_once, WIDTH=width, ROTARY=kpe.shape[2], PAGE=ckv.shape[1], TILE=tile,
            CAUSAL=call.is_causal, ALONE=alone, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if not alone:
            _join[(rows * heads,)](
                mixed, best, weight, out, lse, first * heads, parts, WIDTH=width, JOINED=_JOINED, num_warps=4
            )
    return out if lse is None else (out, lse)


def _heads_at_once(heads: int) -> int:
    return min(_CUT[0], 64 if heads > 32 else 32 if heads > 16 else 16)


def _most_tokens(call: MlaArgs) -> int:
    return call.block_tables.shape[1] * call.ckv_cache.shape[1]


@takes(MlaArgs)
def mla_attention(call: MlaArgs) -> Result:
    """In as many parts as fill the device: a multiprocessor holds two programs at the most."""
    tokens, heads = call.q_nope.shape[:2]
    programs = tokens * triton.cdiv(heads, _heads_at_once(heads))
    parts = parts_of(programs, _most_tokens(call), processors(call.q_nope.device) // 2)
    return _run(call, parts, LEAST_PART, max(tokens, 1), parts == 1)


@takes(MlaArgs)
def mla_attention_in_order(call: MlaArgs) -> Result:
    """In parts of 512 tokens, for few queries at a time where their parts are many."""
    heads, width = call.q_nope.shape[1:]
    parts = max(1, triton.cdiv(_most_tokens(call), _PART))
    return _run(call, parts, _PART, max(1, _MOST_BYTES // (heads * parts * width * 4)), False)
