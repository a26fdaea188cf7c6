"""New keys and values written into a pool of pages, as they are or as codes of eight bits, in one launch."""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from layerzero.backends.triton_kernels.rows import ROUNDING, round_to_code
from layerzero.formats.rounding import SMALLEST_SCALE
from layerzero.formats.table import format_of
from layerzero.ops.kv_formats import note_format, scale_steps
from layerzero.ops.paged.append import copy_if_aliased


@triton.jit
def _append_row(
    row_ptr, cache_ptr, scale_ptr, row, head, place, scale_place, row_step, head_step, largest, smallest,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CODED: tl.constexpr, BY_TOKEN: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    features = tl.arange(0, BLOCK)
    inside = features < WIDTH
    numbers = tl.load(row_ptr + row * row_step + head * head_step + features, mask=inside, other=0.0)
    if not CODED:
        tl.store(cache_ptr + place + features, numbers, mask=inside)
        return
    x = numbers.to(tl.float32)
    if BY_TOKEN:
        odd = tl.max((x != x).to(tl.int32), 0)  # a maximum may pass over NaN
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 0), largest), smallest)
        scale = tl.where(odd > 0, float("nan"), scale)
        tl.store(scale_ptr + scale_place, scale)
    else:
        scale = tl.load(scale_ptr + scale_place)
    code = round_to_code(x, scale, largest, MANTISSA, LEAST)
    tl.store(cache_ptr + place + features, code.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, slot_step, largest, smallest,
    k_row, k_row_head, v_row, v_row_head, k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, CODED: tl.constexpr, BY_TOKEN: tl.constexpr, MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row * slot_step).to(tl.int64)
    page, token = slot // PAGE, slot % PAGE
    if tl.program_id(2) == 0:
        _append_row(
            k_ptr, k_cache_ptr, k_scale_ptr, row, head, page * k_page + token * k_token + head * k_head,
            page * ks_page + token * ks_token + head * ks_head, k_row, k_row_head, largest, smallest,
            WIDTH, BLOCK, CODED, BY_TOKEN, MANTISSA, LEAST,
        )  # fmt: skip
    else:
        _append_row(
            v_ptr, v_cache_ptr, v_scale_ptr, row, head, page * v_page + token * v_token + head * v_head,
            page * vs_page + token * vs_token + head * vs_head, v_row, v_row_head, largest, smallest,
            V_WIDTH, V_BLOCK, CODED, BY_TOKEN, MANTISSA, LEAST,
        )  # fmt: skip


def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layout: str,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """Keys and values in one launch; beside scales as codes, and scales by token are written, too."""
    k, v = copy_if_aliased(k, k_cache, v_cache), copy_if_aliased(v, k_cache, v_cache)
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    scales = [scale for scale in (k_scale, v_scale) if scale is not None]
    (mantissa, min_exponent), largest = (0, 0), 0.0
    if scales:
        form = format_of(k_cache.dtype)
        (mantissa, min_exponent), largest = ROUNDING[form.name], form.element.max_value
    steps = (
        *(rows.stride(axis) for rows in (k, v) for axis in (0, 1)),
        *(pool.stride(axis) for pool in (k_cache, v_cache) for axis in (0, token, head)),
        *(step for scale in scales or (k, v) for step in scale_steps(scale, token, head)),
    )
    _append[(k.shape[0], k.shape[1], 2)](
        k, v, k_cache, v_cache, *(scales or (k, v)), slot_mapping, slot_mapping.stride(0), largest,
        SMALLEST_SCALE, *steps,
        PAGE=k_cache.shape[token], WIDTH=k.shape[2], V_WIDTH=v.shape[2],
        BLOCK=triton.next_power_of_2(k.shape[2]), V_BLOCK=triton.next_power_of_2(v.shape[2]),
        CODED=bool(scales), BY_TOKEN=any(scale.dim() > 1 for scale in scales), MANTISSA=mantissa,
        LEAST=min_exponent, num_warps=1,
    )  # fmt: skip
    for pool, scale in zip((k_cache, v_cache), scales, strict=False):
        note_format(pool, scale)
    return slot_mapping
