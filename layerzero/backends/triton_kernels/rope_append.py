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


@triton.jit
def _turn(
    from_ptr, to_ptr, cos_ptr, sin_ptr, WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    """One head: feature i * STEP turns with the one GAP behind it; what follows both halves passes."""
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_ptr + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + pair, mask=inside, other=0.0)
    first = tl.load(from_ptr + pair * STEP, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + pair * STEP + GAP, mask=inside, other=0.0).to(tl.float32)
    kind = to_ptr.dtype.element_ty
    tl.store(to_ptr + pair * STEP, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(to_ptr + pair * STEP + GAP, (second * cos + first * sin).to(kind), mask=inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)
        tl.store(to_ptr + rest, tl.load(from_ptr + rest, mask=rest < WIDTH), mask=rest < WIDTH)


@triton.jit
def _rope(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, positions_ptr, cos_ptr, sin_ptr, q_row, q_head, k_row, k_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    """A program is one head of one token: of q, then of k."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    angles = tl.load(positions_ptr + row).to(tl.int64) * HALF
    if head < Q_HEADS:
        _turn(
            q_ptr + row * q_row + head * q_head, q_out_ptr + (row * Q_HEADS + head) * WIDTH, cos_ptr + angles,
            sin_ptr + angles, WIDTH, HALF, BLOCK, REST, STEP, GAP,
        )  # fmt: skip
    else:
        head -= Q_HEADS
        _turn(
            k_ptr + row * k_row + head * k_head, k_out_ptr + (row * K_HEADS + head) * WIDTH, cos_ptr + angles,
            sin_ptr + angles, WIDTH, HALF, BLOCK, REST, STEP, GAP,
        )  # fmt: skip


def _turns(width: int, half: int, interleaved: bool) -> dict[str, int]:
    """The constants of `_turn`."""
    rest = width - 2 * half
    return {
        "WIDTH": width, "HALF": half, "BLOCK": triton.next_power_of_2(half),
        "REST": triton.next_power_of_2(rest) if rest else 0, "STEP": 2 if interleaved else 1,
        "GAP": 1 if interleaved else half,
    }  # fmt: skip


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, _: None
) -> tuple[Tensor, Tensor]:
    """One program a head of q and k; they are copied only where their tokens are no one axis."""
    cos, sin = (angles.to(torch.float32).contiguous() for angles in (cos, sin))
    outs = tuple(torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) for rows in (q, k))
    rows, keys = q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:])
    heads, key_heads = rows.shape[1], keys.shape[1]
    _rope[(len(rows), heads + key_heads)](
        *outs, rows, keys, positions.reshape(-1).contiguous(), cos, sin,
        *(each.stride(axis) for each in (rows, keys) for axis in (0, 1)),
        Q_HEADS=heads, K_HEADS=key_heads, **_turns(rows.shape[2], cos.shape[1], interleaved), num_warps=1,
    )  # fmt: skip
    return outs


@triton.jit
def _rope_append(
    out_ptr, q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
    position_step, slot_step, q_row, q_head, k_row, k_head, v_row, v_head,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, V_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    """A program is one head of one token: of q, then of k, then of v."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    angles = tl.load(positions_ptr + row * position_step).to(tl.int64) * HALF
    if head < Q_HEADS:
        _turn(
            q_ptr + row * q_row + head * q_head, out_ptr + (row * Q_HEADS + head) * WIDTH, cos_ptr + angles,
            sin_ptr + angles, WIDTH, HALF, BLOCK, REST, STEP, GAP,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + row * slot_step).to(tl.int64)
        page, token = slot // PAGE, slot % PAGE
        if head < Q_HEADS + K_HEADS:
            key_head = head - Q_HEADS
            _turn(
                k_ptr + row * k_row + key_head * k_head,
                k_cache_ptr + page * kc_page + token * kc_token + key_head * kc_head, cos_ptr + angles,
                sin_ptr + angles, WIDTH, HALF, BLOCK, REST, STEP, GAP,
            )  # fmt: skip
        else:
            key_head = head - Q_HEADS - K_HEADS
            feature = tl.arange(0, V_BLOCK)
            value = tl.load(v_ptr + row * v_row + key_head * v_head + feature, mask=feature < V_WIDTH)
            place = v_cache_ptr + page * vc_page + token * vc_token + key_head * vc_head
            tl.store(place + feature, value, mask=feature < V_WIDTH)


def rope_append_kv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, interleaved: bool, layout: str,
) -> Tensor:  # fmt: skip
    """One program a head of q, k and v; rows that lie in a pool are copied before any is written."""
    q, k, v = (copy_if_aliased(rows, k_cache, v_cache) for rows in (q, k, v))
    cos, sin = (angles.to(torch.float32).contiguous() for angles in (cos, sin))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    heads, key_heads = q.shape[1], k.shape[1]
    _rope_append[(q.shape[0], heads + 2 * key_heads)](
        out, q, k, v, k_cache, v_cache, positions, slot_mapping, cos, sin,
        positions.stride(0), slot_mapping.stride(0),
        *(rows.stride(axis) for rows in (q, k, v) for axis in (0, 1)),
        *(pool.stride(axis) for pool in (k_cache, v_cache) for axis in (0, token, head)),
        Q_HEADS=heads, K_HEADS=key_heads, PAGE=k_cache.shape[token], V_WIDTH=v.shape[2],
        V_BLOCK=triton.next_power_of_2(v.shape[2]), **_turns(q.shape[2], cos.shape[1], interleaved),
        num_warps=1,
    )  # fmt: skip
    return out
