"""Triton kernels over rows: the residual sum with its norm, rounding to eight bits, the gate of an mlp.

Whatever rounds does so by itself: casts to eight bits differ between Triton's interpreter and its compiler,
and between compute capabilities.
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from layerzero.ops.quantize.quantize import FORMATS, SMALLEST_SCALE

# Adding and taking 1.5 * 2**23 leaves the nearest whole number, halves to even, of what is below 2**22.
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _add_and_norm(
    x_ptr, residual_ptr, weight_ptr, total_ptr, row, columns, inside, width, eps, HAS_WEIGHT: tl.constexpr
):  # fmt: skip
    """The normalised sum of a row in float32; the sum that is normalised is the one stored, rounded."""
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row + columns, total, mask=inside)
    wide = total.to(tl.float32)
    out = wide / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    if HAS_WEIGHT:
        out = out * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return out


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, width, eps,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    out = _add_and_norm(
        x_ptr, residual_ptr, weight_ptr, total_ptr, row, columns, inside, width, eps, HAS_WEIGHT
    )
    tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Sum and norm of each row in one launch, one program a row."""
    width = x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x.numel() // width,)](
        x, residual, x if weight is None else weight, out, total, width, eps,
        HAS_WEIGHT=weight is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out, total


@triton.jit
def round_to_code(x, scale, largest, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """What `x` is by `scale`, as a number of the format: clamped, halves to even."""
    code = tl.div_rn(x, scale + tl.zeros_like(x))
    code = tl.where(code != code, 0.0, code)
    code = tl.minimum(tl.maximum(code, -largest), largest)
    if MANTISSA == 0:
        code = (code + MAGIC) - MAGIC
    else:
        # The distance of the codes around a number follows from its exponent, but not below the least.
        bits = code.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, LEAST)
        shift = (((exponent + 23 - MANTISSA) << 23) | 0x400000).to(tl.float32, bitcast=True)
        size = ((tl.abs(code) + shift) - shift).to(tl.int32, bitcast=True)
        # What rounds to zero keeps its sign, as in a cast.
        code = (size | (bits & -2147483648)).to(tl.float32, bitcast=True)
    return code


@triton.jit
def _quantize(
    x_ptr, codes_ptr, scale_ptr, width, largest, smallest,
    GIVEN: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + program * width + columns, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(scale_ptr + program)
    else:
        abs_max = tl.max(tl.abs(x), 0)
        odd = tl.max((x != x).to(tl.int32), 0)  # a maximum may pass over NaN
        scale = tl.maximum(tl.div_rn(abs_max, largest), smallest)
        scale = tl.where(odd > 0, float("nan"), scale)
        tl.store(scale_ptr + program, scale)
    code = round_to_code(x, scale, largest, MANTISSA, LEAST)
    tl.store(codes_ptr + program * width + columns, code.to(codes_ptr.dtype.element_ty), mask=inside)


# Bits of the mantissa, and the biased float32 exponent of the smallest normal number.
ROUNDING = {"int8": (0, 0), "fp8_e4m3": (3, 127 - 6), "fp8_e5m2": (2, 127 - 14)}


def quantize(
    x: Tensor, form: str, granularity: str, group_size: int, scale: Tensor | None, _: None = None
) -> tuple[Tensor, Tensor]:
    """Largest magnitude, scale and codes of each row or group in one launch."""
    width = group_size if granularity == "group" else x.shape[-1]
    codes = torch.empty(x.shape, dtype=FORMATS[form].element.storage, device=x.device)
    shape = (*x.shape[:-1], x.shape[-1] // width)
    scales = (
        torch.empty(shape, dtype=torch.float32, device=x.device)
        if scale is None
        else scale.float().contiguous()
    )
    mantissa, min_exponent = ROUNDING[form]
    block = triton.next_power_of_2(width)
    _quantize[(x.numel() // width,)](
        x, codes, scales, width, FORMATS[form].element.max_value, SMALLEST_SCALE,
        GIVEN=scale is not None, MANTISSA=mantissa, LEAST=min_exponent, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return codes, scales if scale is None else scale.clone()


@triton.jit
def _add_rms_norm_quantize(
    x_ptr, residual_ptr, weight_ptr, codes_ptr, scale_ptr, total_ptr, width, eps, largest, smallest,
    HAS_WEIGHT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, MANTISSA: tl.constexpr,
    LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    out = _add_and_norm(
        x_ptr, residual_ptr, weight_ptr, total_ptr, row, columns, inside, width, eps, HAS_WEIGHT
    )
    # One group is the whole block, padded; several divide it without a rest.
    parts = tl.reshape(tl.abs(out), (GROUPS, BLOCK // GROUPS))
    odd = tl.max(tl.reshape((out != out).to(tl.int32), (GROUPS, BLOCK // GROUPS)), 1)
    scale = tl.maximum(tl.div_rn(tl.max(parts, 1), largest), smallest)
    scale = tl.where(odd > 0, float("nan"), scale)
    groups = tl.arange(0, GROUPS)
    used = groups * GROUP < width
    tl.store(scale_ptr + program * (width // GROUP) + groups, scale, mask=used)
    spread = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, BLOCK // GROUPS)), (BLOCK,))
    code = round_to_code(out, spread, largest, MANTISSA, LEAST)
    tl.store(codes_ptr + row + columns, code.to(codes_ptr.dtype.element_ty), mask=inside)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    form: str,
    granularity: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum, norm, scales and codes of each row in one launch, one program a row."""
    width = x.shape[-1]
    group = group_size if granularity == "group" else width
    block = triton.next_power_of_2(width)
    codes, total = (
        torch.empty(x.shape, dtype=FORMATS[form].element.storage, device=x.device),
        torch.empty_like(x),
    )
    scale = torch.empty((*x.shape[:-1], width // group), dtype=torch.float32, device=x.device)
    mantissa, min_exponent = ROUNDING[form]
    _add_rms_norm_quantize[(x.numel() // width,)](
        x, residual, x if weight is None else weight, codes, scale, total, width, eps,
        FORMATS[form].element.max_value, SMALLEST_SCALE, HAS_WEIGHT=weight is not None,
        GROUPS=1 if group == width else block // group, GROUP=group, MANTISSA=mantissa, LEAST=min_exponent,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return codes, scale, total


_GATE_BLOCK = 1024


@triton.jit
def _gate(up_ptr, out_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A program is one block of one row: the gate, rounded to the value's dtype, times the value."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(up_ptr + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up_ptr + (2 * row + 1) * width + columns, mask=inside, other=0.0)
    if KIND == "swiglu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == "geglu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "geglu_tanh":
        # (1 + tanh(y)) / 2 is the logistic function of 2 y.
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = tl.where(gate < 0.0, 0.0, gate)  # NaN passes
    out = gate.to(value.dtype).to(tl.float32) * value.to(tl.float32)
    tl.store(out_ptr + row * width + columns, out.to(value.dtype), mask=inside)


def mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str
) -> Tensor:
    """torch's products around one launch for the gate."""
    up = functional.linear(x, w_up, b_up)
    width = up.shape[-1] // 2
    hidden = torch.empty((*up.shape[:-1], width), dtype=up.dtype, device=up.device)
    _gate[(up.numel() // up.shape[-1], triton.cdiv(width, _GATE_BLOCK))](
        up, hidden, width, KIND=activation, BLOCK=_GATE_BLOCK
    )
    return functional.linear(hidden, w_down, b_down)


def _warps(block: int) -> int:
    """Eight elements a thread, between one warp and sixteen."""
    return max(1, min(16, block // 256))
