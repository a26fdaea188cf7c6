"""Ragged and dense attention over codes: the rows of `paged_rows`, whose keys lie behind each other.

Queries of codes meet keys of codes in the product of eight-bit units, and their scales go into the scores, as
SageAttention does (arXiv 2410.02367); queries of numbers meet keys that become numbers of their type. Its
smoothing of keys belongs to the caller that rounds them: codes are attended to as they are given.
"""

# Triton's functions are no Python to a type checker: it counts their constants as arguments.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from layerzero.backends.triton_kernels.paged import LOG2_E, PoolArgs, scale_log2
from layerzero.backends.triton_kernels.paged_rows import attend, tile_of
from layerzero.backends.triton_kernels.products import INTERPRETED
from layerzero.ops import kv_formats
from layerzero.ops.attention.adapters import Result, takes
from layerzero.ops.attention.arguments import AttentionArgs, RaggedArgs
from layerzero.ops.attention.checks import head_axes, window_bounds


@takes(RaggedArgs)
def ragged_attention(call: RaggedArgs) -> Result:
    """Sequences of any lengths: one place of an axis, at their offsets."""
    operands: dict[str, Any] = {name: getattr(call, name).unsqueeze(0) for name in ("q", "k", "v")}
    for name in kv_formats.OPERAND_SCALES:
        scale = getattr(call, name)
        if scale is not None and scale.dim() > 1:
            operands[name] = scale.unsqueeze(0)
    out, lse = _attend(call._replace(**operands), 2, (call.cu_seqlens_q, call.cu_seqlens_k))
    return out[0] if lse is None else (out[0], lse[0].t())


@takes(AttentionArgs)
def attention(call: AttentionArgs) -> Result:
    """Sequences of one length: offsets follow from it."""
    out, lse = _attend(call, head_axes(call.layout)[0], (None, None))
    return out if lse is None else (out, lse)


def _attend(
    call: Any, head: int, offsets: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Operands of four axes, heads at axis `head`; the log-sum-exp is (B, Hq, Sq) whatever the layout."""
    q, token = call.q, 3 - head
    width, heads, axes = q.shape[3], q.shape[head], (0, token, head)
    sequences = q.shape[0] if offsets[0] is None else offsets[0].shape[0] - 1
    starts = [None if each is None else each.contiguous() for each in offsets]
    pool = PoolArgs.of_pools((call.k, call.v), (call.k_scale, call.v_scale), token, head, 0)
    cut, queries = tile_of(heads // pool.key_heads, width)
    dtype = kv_formats.number_dtype(q)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = q.new_empty((q.shape[0], q.shape[token], heads), dtype=torch.float32) if call.return_lse else None
    steps = (0, 0, 0) if call.q_scale is None else kv_formats.scale_steps(call.q_scale, token, head)
    left_window, right_window = window_bounds(call.is_causal, call.window)
    wide = "float16" if INTERPRETED and dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    rows = q.shape[0] * q.shape[token]
    attend[(rows // queries + sequences, pool.key_heads)](
        q, call.k, call.v, None, None, *starts, out, lse, call.q_scale, *pool.scales,
        scale_log2(call.scale, width), (call.softcap or 0.0) * LOG2_E, sequences, q.shape[token],
        call.k.shape[token], left_window, right_window, *(q.stride(axis) for axis in axes), *pool.steps, 0,
        *pool.scale_steps, *(out.stride(axis) for axis in axes),
        *((0, 0, 0) if lse is None else lse.stride()), *steps,
        LEFT=left_window >= 0, RIGHT=right_window >= 0, WIDE=getattr(tl, wide),
        SOFTCAP=call.softcap is not None,
        **cut, **pool.constants,
    )  # fmt: skip
    return out, None if lse is None else lse.transpose(1, 2)
