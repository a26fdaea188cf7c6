"""Numbers in eight bits with their scales: quantize and dequantize.

A code times its scale is the number. Scales are float32 and symmetric about zero: one for the whole tensor,
one for each row, or one for each group of neighbours in a row; their shape says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, Op, register
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How a code is stored, and the largest magnitude that is used."""

    dtype: torch.dtype
    max_value: float


# -128 is left out, so that codes are symmetric; the float8 bounds are their largest finite numbers.
FORMATS: Mapping[str, QuantFormat] = {
    "int8": QuantFormat(torch.int8, 127.0),
    "fp8_e4m3": QuantFormat(torch.float8_e4m3fn, 448.0),
    "fp8_e5m2": QuantFormat(torch.float8_e5m2, 57344.0),
}
FORMAT_OF = {form.dtype: name for name, form in FORMATS.items()}
GRANULARITIES = ("tensor", "row", "group")
FLOAT_NAMES = ("float32", "float16", "bfloat16", "float64")
# Below this a scale would be subnormal, and dividing by it could overflow.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@op_signature()
def quantize(
    x: Tensor,
    *,
    format: str = "int8",
    granularity: str = "row",
    group_size: int = 0,
    scale: Tensor | None = None,
) -> SignedCall:
    """Round `x` to eight-bit codes and the scales that give it back.

    Args: x (..., C), any float dtype; format is int8, fp8_e4m3 or fp8_e5m2; granularity is tensor, row or
        group, groups being group_size neighbours of a row, which divides C. scale, float32, in the shape of
        the second result, is used as given; None takes the largest magnitude of what shares the scale.
    Returns: (codes, scale): codes in x's shape; scale float32 of shape (), (..., 1) or (..., C / group_size).
        Halves round to even; what lies beyond the format is clamped, never NaN. A NaN or infinity in x makes
        the scale that it shares NaN or infinite, so that what comes back is NaN.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """
    raise NotImplementedError


def scale_shape(shape: tuple[int, ...], granularity: str, group_size: int) -> tuple[int, ...]:
    """The shape of the scales of a tensor."""
    if granularity == "tensor":
        return ()
    return (*shape[:-1], 1 if granularity == "row" else shape[-1] // group_size)


def _check_quantize(args: Args) -> CallSpec:
    x, form, granularity, group_size, scale = args
    checks.need_rows("x", x)
    _need_wide("x", x)
    checks.need_choice("format", form, FORMATS)
    checks.need_choice("granularity", granularity, GRANULARITIES)
    width = x.shape[-1]
    if granularity == "group":
        checks.need_int("group_size", group_size, low=1)
        if width % group_size:
            raise ValueError(f"group_size needs to divide x's last axis of {width}, got {group_size}")
    elif checks.need_int("group_size", group_size) != 0:
        raise ValueError(f"group_size needs 0 for granularity={granularity!r}, got {group_size!r}")
    if scale is not None:
        need_scale("scale", scale, scale_shape(tuple(x.shape), granularity, group_size))
        checks.need_same_device("x", x, scale=scale)
    features = {f"quant_{form}": True, f"scale_per_{granularity}": True, "scale_given": scale is not None}
    return describe("quantize", [x], {"N": x.numel() // width, "C": width, "S": group_size}, features)


def _need_wide(name: str, x: Tensor) -> None:
    if checks.dtype_name(x.dtype) not in FLOAT_NAMES:
        raise TypeError(f"{name} needs {', '.join(FLOAT_NAMES)}, got {checks.dtype_name(x.dtype)}")


def need_scale(name: str, value: Any, *shapes: tuple[int, ...]) -> Tensor:
    """`given` as a float32 tensor of one of `shapes`."""
    checks.need_tensor(name, value)
    scale: Tensor = value
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} needs dtype float32, got {checks.dtype_name(scale.dtype)}")
    if tuple(scale.shape) not in shapes:
        expected_shapes = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name} needs shape {expected_shapes}, got {tuple(scale.shape)}")
    return scale


def quantize_reference(
    x: Tensor, format: str, granularity: str, group_size: int, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scale, round, clamp, in float32 for every dtype of x: all kernels give the same codes."""
    form, wide = FORMATS[format], x.float()
    if granularity == "group":
        wide = wide.unflatten(-1, (-1, group_size))
    if scale is None:
        largest = wide.abs().amax() if granularity == "tensor" else wide.abs().amax(-1)
        # By a tensor: a GPU multiplies by the reciprocal of a number, and the scales would be others.
        format_max = torch.full((), form.max_value, device=x.device)
        scales = (largest / format_max).clamp_min(SMALLEST_SCALE)
        if granularity == "row":
            scales = scales.unsqueeze(-1)
    else:
        scales = scale.float()
    scale_per_element = scales.unsqueeze(-1) if granularity == "group" else scales
    return encode(wide / scale_per_element, form).view(x.shape), scales


def encode(codes: Tensor, form: QuantFormat) -> Tensor:
    """Float32 numbers as codes: NaN becomes 0, and the clamp comes before the cast.

    A float8 cast of what lies beyond the format gives NaN on a GPU and the largest number on some CPUs.
    """
    codes = codes.nan_to_num(nan=0.0, posinf=form.max_value, neginf=-form.max_value)
    codes = codes.clamp(-form.max_value, form.max_value)
    return (codes.round() if form.dtype == torch.int8 else codes).to(form.dtype)


def _outputs(args: Args) -> tuple[OutputSpec, ...]:
    x, form, granularity, group_size, _ = args
    shape = tuple(x.shape)
    codes = checks.dtype_name(FORMATS[form].dtype)
    return (OutputSpec(shape, codes), OutputSpec(scale_shape(shape, granularity, group_size), "float32"))


def _empty(args: Args) -> tuple[Tensor, Tensor] | None:
    x, form, granularity, group_size, scale = args
    if x.numel():
        return None
    shape = scale_shape(tuple(x.shape), granularity, group_size)
    codes = x.new_empty(x.shape, dtype=FORMATS[form].dtype)
    # Nothing shares the scale of an empty tensor; any number gives nothing back.
    return codes, x.new_ones(shape, dtype=torch.float32) if scale is None else scale


def _quantize_work(spec: CallSpec) -> WorkEstimate:
    """A maximum, a division, a rounding; rows are read once and leave as bytes."""
    n, c = spec.dim("N"), spec.dim("C")
    return WorkEstimate(flops=4.0 * n * c, bytes=float(n * c * (checks.dtype_bytes(spec.dtype) + 1)))


QUANTIZE = register(
    Op(
        build=quantize,
        check=_check_quantize,
        reference=quantize_reference,
        outputs=_outputs,
        work=_quantize_work,
        operands=(0,),
        exact_dims=frozenset({"C", "S"}),
        empty=_empty,
        # One scale for the tensor would become one scale for everybody's rows.
        batching=RowBatching(row_operands=(0, 4), accepts=lambda args: bool(args[2] != "tensor")),
        differentiable=False,
        wide_outputs=frozenset({0, 1}),
    )
)


@op_signature()
def dequantize(codes: Tensor, scale: Tensor, *, dtype: str = "float32") -> SignedCall:
    """Give back the numbers that `codes` and `scale` stand for.

    Args: codes (..., C) of int8, float8_e4m3fn or float8_e5m2; scale float32 of shape (), (..., 1) or
        (..., G), each of a row's G scales for C / G neighbours; dtype is the name of the result's.
    Returns: codes times scale, multiplied in float32, in codes' shape.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """
    raise NotImplementedError


def _check_dequantize(args: Args) -> CallSpec:
    codes, scale, dtype = args
    need_codes("codes", codes)
    checks.need_choice("dtype", dtype, FLOAT_NAMES)
    checks.need_tensor("scale", scale)
    shape = tuple(codes.shape)
    groups = scale.shape[-1] if scale.dim() else 1
    divides = groups >= 1 and shape[-1] % groups == 0
    need_scale("scale", scale, (), (*shape[:-1], groups if divides else 1))
    checks.need_same_device("codes", codes, scale=scale)
    width = shape[-1]
    size = 0 if scale.dim() == 0 or groups == 1 else width // groups
    granularity = "tensor" if scale.dim() == 0 else "group" if size else "row"
    return describe(
        "dequantize",
        [codes],
        {"N": codes.numel() // width, "C": width, "S": size},
        {f"quant_{FORMAT_OF[codes.dtype]}", f"scale_per_{granularity}"},
        dtype=dtype,
    ).replace(dtypes=(dtype,))


def need_codes(name: str, value: Any, *, rank: int | None = None) -> Tensor:
    """`given` as a tensor (..., C) of one of the formats' dtypes."""
    checks.need_tensor(name, value, rank=rank, floating=False)
    codes: Tensor = value
    if codes.dtype not in FORMAT_OF:
        allowed_dtypes = ", ".join(checks.dtype_name(form.dtype) for form in FORMATS.values())
        raise TypeError(f"{name} needs dtype {allowed_dtypes}, got {checks.dtype_name(codes.dtype)}")
    if codes.dim() == 0 or codes.shape[-1] == 0:
        raise ValueError(f"{name} needs a last axis of at least 1, got shape {tuple(codes.shape)}")
    return codes


def dequantize_reference(codes: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Each code times its scale, in float32 at least."""
    return decode(codes, scale).to(getattr(torch, dtype))


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Codes times scales in the scales' dtype."""
    wide = codes.to(scale.dtype)
    if scale.dim() == 0 or scale.shape[-1] == 1:
        return wide * scale
    groups: Tensor = wide.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)
    return groups.flatten(-2)


def _dequantize_work(spec: CallSpec) -> WorkEstimate:
    n, c = spec.dim("N"), spec.dim("C")
    return WorkEstimate(flops=float(n * c), bytes=float(n * c * (checks.dtype_bytes(spec.dtype) + 1)))


DEQUANTIZE = register(
    Op(
        build=dequantize,
        check=_check_dequantize,
        reference=dequantize_reference,
        outputs=lambda args: (OutputSpec(tuple(args[0].shape), args[2]),),
        work=_dequantize_work,
        operands=(0,),
        exact_dims=frozenset({"C", "S"}),
        batching=RowBatching(row_operands=(0, 1), accepts=lambda args: bool(args[1].dim() > 0)),
        differentiable=False,
        wide_outputs=frozenset({0}),
    )
)
