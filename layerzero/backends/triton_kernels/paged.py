"""Paged attention for decoding over short contexts: one program a sequence and key head, no split or plan."""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_TILE = 64  # tokens that a program reads at a time
_LEAST_ROWS = 16  # of a product of matrix units: groups of fewer query heads are padded


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, scale_log2,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, tables_row, out_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    length = tl.load(lens_ptr + sequence)
    rows, features = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = head * GROUP + rows
    q = tl.load(
        q_ptr + sequence * q_row + heads[:, None] * q_head + features[None, :],
        mask=(rows < GROUP)[:, None], other=0.0,
    )  # fmt: skip
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, length, TILE):
        tokens = start + tl.arange(0, TILE)
        inside = tokens < length
        page = tl.load(tables_ptr + sequence * tables_row + tokens // PAGE, mask=inside, other=0).to(tl.int64)
        k = tl.load(
            k_ptr + (page * k_page + (tokens % PAGE) * k_token + head * k_head)[:, None] + features[None, :],
            mask=inside[:, None], other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_ptr + (page * v_page + (tokens % PAGE) * v_token + head * v_head)[:, None] + features[None, :],
            mask=inside[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        shrink = tl.exp2(best - largest)
        weight = weight * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = largest
    out = tl.where(weight[:, None] > 0.0, mixed / weight[:, None], 0.0)
    tl.store(
        out_ptr + sequence * out_row + heads[:, None] * WIDTH + features[None, :],
        out.to(out_ptr.dtype.element_ty), mask=(rows < GROUP)[:, None],
    )  # fmt: skip


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None, is_causal: bool = True, scale: float | None = None,
    window: Any = None, softcap: Any = None, layout: str = "NHD", return_lse: bool = False,
) -> Tensor:  # fmt: skip
    """One query token a sequence; the last five arguments but the layout are what the capability leaves."""
    sequences, heads, width = q.shape
    token, head, key_heads, page = (1, 2, 2, 1) if layout == "NHD" else (2, 1, 1, 2)
    groups = heads // k_cache.shape[key_heads]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    tables, lens = block_tables.to(torch.int32).contiguous(), seq_lens.to(torch.int32).contiguous()
    _decode[(sequences, k_cache.shape[key_heads])](
        q, k_cache, v_cache, tables, lens, out, (width**-0.5 if scale is None else scale) * _LOG2_E,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(token), k_cache.stride(head),
        v_cache.stride(0), v_cache.stride(token), v_cache.stride(head), tables.stride(0), out.stride(0),
        GROUP=groups, ROWS=max(_LEAST_ROWS, triton.next_power_of_2(groups)), WIDTH=width,
        PAGE=k_cache.shape[page], TILE=_TILE, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
