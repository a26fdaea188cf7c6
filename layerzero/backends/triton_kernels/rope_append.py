"""Queries and keys turned in one launch; with it, keys and values may be written into a pool of pages."""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.ops.paged.append import copy_if_aliased

# Heads of a program, and its warps.
_HEADS, _WARPS = 8, 4


@triton.jit
def _turn(
    from_ptr, to_ptr, cos_ptr, sin_ptr, group, from_head, to_head, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Some heads of a token: feature i * STEP turns with the one GAP behind it; what follows both passes."""
    pair, head = tl.arange(0, BLOCK)[None, :], (group * HEADS + tl.arange(0, HEADS))[:, None]
    inside = (pair < HALF) & (head < COUNT)
    from_ptr, to_ptr = from_ptr + head * from_head, to_ptr + head * to_head
    cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)
    first = tl.load(from_ptr + pair * STEP, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + pair * STEP + GAP, mask=inside, other=0.0).to(tl.float32)
    kind = to_ptr.dtype.element_ty
    tl.store(to_ptr + pair * STEP, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(to_ptr + pair * STEP + GAP, (second * cos + first * sin).to(kind), mask=inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        passes = (rest < WIDTH) & (head < COUNT)
        tl.store(to_ptr + rest, tl.load(from_ptr + rest, mask=passes), mask=passes)


@triton.jit
def _rope_append(
    out_ptr, q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
    position_step, slot_step, q_row, q_head, k_row, k_head, v_row, v_head,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    PAGE: tl.constexpr, V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program is some heads of one token: of q, then of k, then of v."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = tl.load(positions_ptr + row * position_step).to(tl.int64) * HALF
    q_groups, k_groups = (Q_HEADS + HEADS - 1) // HEADS, (K_HEADS + HEADS - 1) // HEADS
    if group < q_groups:
        _turn(
            q_ptr + row * q_row, out_ptr + row * Q_HEADS * WIDTH, cos_ptr + angles, sin_ptr + angles, group,
            q_head, WIDTH, Q_HEADS, WIDTH, HALF, BLOCK, REST, STEP, GAP, HEADS,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + row * slot_step).to(tl.int64)
        page, token = slot // PAGE, slot % PAGE
        group -= q_groups
        if group < k_groups:
            _turn(
                k_ptr + row * k_row, k_cache_ptr + page * kc_page + token * kc_token, cos_ptr + angles,
                sin_ptr + angles, group, k_head, kc_head, K_HEADS, WIDTH, HALF, BLOCK, REST, STEP, GAP, HEADS,
            )  # fmt: skip
        else:
            feature = tl.arange(0, V_BLOCK)[None, :]
            head = ((group - k_groups) * HEADS + tl.arange(0, HEADS))[:, None]
            inside = (feature < V_WIDTH) & (head < K_HEADS)
            values = tl.load(v_ptr + row * v_row + head * v_head + feature, mask=inside)
            place = v_cache_ptr + page * vc_page + token * vc_token + head * vc_head
            tl.store(place + feature, values, mask=inside)


@triton.jit
def _rope(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, positions_ptr, cos_ptr, sin_ptr, q_row, q_head, k_row, k_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program is some heads of one token: of q, then of k."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = tl.load(positions_ptr + row).to(tl.int64) * HALF
    q_groups = (Q_HEADS + HEADS - 1) // HEADS
    if group < q_groups:
        _turn(
            q_ptr + row * q_row, q_out_ptr + row * Q_HEADS * WIDTH, cos_ptr + angles, sin_ptr + angles, group,
            q_head, WIDTH, Q_HEADS, WIDTH, HALF, BLOCK, REST, STEP, GAP, HEADS,
        )  # fmt: skip
    else:
        _turn(
            k_ptr + row * k_row, k_out_ptr + row * K_HEADS * WIDTH, cos_ptr + angles, sin_ptr + angles,
            group - q_groups, k_head, WIDTH, K_HEADS, WIDTH, HALF, BLOCK, REST, STEP, GAP, HEADS,
        )  # fmt: skip


def _shape(q: Tensor, k: Tensor, half: int, interleaved: bool) -> dict[str, int]:
    """The constants of a launch over q (N, Hq, D) and k (N, Hk, D)."""
    width = q.shape[2]
    rest = width - 2 * half
    return {
        "Q_HEADS": q.shape[1], "K_HEADS": k.shape[1], "WIDTH": width, "HALF": half,
        "BLOCK": triton.next_power_of_2(half), "REST": triton.next_power_of_2(rest) if rest else 0,
        "STEP": 2 if interleaved else 1, "GAP": 1 if interleaved else half, "HEADS": _HEADS,
        "num_warps": _WARPS,
    }  # fmt: skip


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, _: None
) -> tuple[Tensor, Tensor]:
    """Heads of q and k in one launch; they are copied only where their tokens are no one axis."""
    cos, sin = (angles.to(torch.float32).contiguous() for angles in (cos, sin))
    whole = torch.contiguous_format
    outs = torch.empty_like(q, memory_format=whole), torch.empty_like(k, memory_format=whole)
    rows, keys = q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:])
    groups = sum(triton.cdiv(each.shape[1], _HEADS) for each in (rows, keys))
    _rope[(len(rows), groups)](
        *outs, rows, keys, positions.reshape(-1).contiguous(), cos, sin,
        *(each.stride(axis) for each in (rows, keys) for axis in (0, 1)),
        **_shape(rows, keys, cos.shape[1], interleaved),
    )  # fmt: skip
    return outs


def rope_append_kv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, interleaved: bool, layout: str,
) -> Tensor:  # fmt: skip
    """Heads of q, k and v in one launch; rows that lie in a pool are copied before any is written."""
    q, k, v = (copy_if_aliased(rows, k_cache, v_cache) for rows in (q, k, v))
    cos, sin = (angles.to(torch.float32).contiguous() for angles in (cos, sin))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    groups = sum(triton.cdiv(each.shape[1], _HEADS) for each in (q, k, v))
    _rope_append[(q.shape[0], groups)](
        out, q, k, v, k_cache, v_cache, positions, slot_mapping, cos, sin,
        positions.stride(0), slot_mapping.stride(0),
        *(rows.stride(axis) for rows in (q, k, v) for axis in (0, 1)),
        *(pool.stride(axis) for pool in (k_cache, v_cache) for axis in (0, token, head)),
        PAGE=k_cache.shape[token], V_WIDTH=v.shape[2], V_BLOCK=triton.next_power_of_2(v.shape[2]),
        **_shape(q, k, cos.shape[1], interleaved),
    )  # fmt: skip
    return out
