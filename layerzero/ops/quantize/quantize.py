"""Numbers of a quantized format with their scales: quantize and dequantize.

A code times its scale is the number. What a format's codes and scales are is in `layerzero.formats`; the
shape of the scales says what shares one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.formats import checks as format_checks
from layerzero.formats.quantized_tensor import usual_scales
from layerzero.formats.rounding import SMALLEST_SCALE as SMALLEST_SCALE
from layerzero.formats.rounding import layout_of_scale, restore, round_to_format
from layerzero.formats.rounding import scale_shape as scale_shape
from layerzero.formats.table import FORMATS as ALL_FORMATS
from layerzero.formats.table import GRANULARITIES, Format, format_of
from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, define_op
from layerzero.ops.quantize.operands import need_codes, per_matrix, weight_features
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec

# The formats of eight bits with scales of float32, whose dtype says the format.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {name: ALL_FORMATS[name] for name in ("int8", "fp8_e4m3", "fp8_e5m2")}
)
FORMAT_OF = {form.element.storage: name for name, form in FORMATS.items()}
FLOAT_NAMES = ("float32", "float16", "bfloat16", "float64")


def _usual_granularity(format: str) -> str:
    return ALL_FORMATS[checks.need_choice("format", format, ALL_FORMATS)].granularities[0]


def _usual_group(format: str, granularity: str) -> int:
    form = ALL_FORMATS[checks.need_choice("format", format, ALL_FORMATS)]
    # Eight-bit groups have no usual size.
    if format in FORMATS and granularity != "block":
        return 0
    return usual_scales(form, granularity, None)[1]


@op_signature(default={"granularity": _usual_granularity, "group_size": _usual_group})
def quantize(
    x: Tensor,
    *,
    format: str = "int8",
    granularity: str | None = None,
    group_size: int | None = None,
    scale: Tensor | None = None,
    tensor_scale: Tensor | None = None,
) -> SignedCall:
    """Round `x` to the codes of a number format and the scales that give it back.

    Args: x (..., C), any float dtype; format is int8, fp8_e4m3, fp8_e5m2, int4, nf4, mxfp4, mxfp8 or nvfp4;
        granularity is tensor, row, group or block, the format's usual one where None; group_size is how many
        neighbours of a row share a scale, which divides C, or a block's side: None is the format's usual one,
        0 says that nothing is grouped. scale, in the shape and a dtype of the second result, is used as
        given and needs to be positive, which is looked at on a CPU; None takes the largest magnitude of what
        shares the scale. tensor_scale, float32 (), is nvfp4's second level, 1 where None.
    Returns: (codes, scale): codes int8, float8 or, of four bits, uint8 (..., C / 2) with the even place in
        the low half of a byte; scale float32, float8_e8m0fnu (mxfp4, mxfp8) or float8_e4m3fn (nvfp4) of
        shape (), (..., 1), (..., C / group_size) or, of blocks, (..., R / group_size, C / group_size) rounded
        up.
        Halves round to even; what lies beyond the format is clamped, never NaN. A NaN or infinity in x makes
        the scale that it shares NaN or infinite, so that what comes back is not finite.
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    """
    raise NotImplementedError


def _check_quantize(args: Args) -> CallSpec:
    x, name, granularity, group_size, scale, tensor_scale = args
    checks.need_rows("x", x)
    if (dtype := checks.dtype_name(x.dtype)) not in FLOAT_NAMES:
        raise TypeError(f"x needs {', '.join(FLOAT_NAMES)}, got {dtype}")
    checks.need_choice("format", name, ALL_FORMATS)
    checks.need_choice("granularity", granularity, GRANULARITIES)
    form, width, shape = ALL_FORMATS[name], x.shape[-1], tuple(x.shape)
    checks.need_int("group_size", group_size)
    format_checks.check_grouping(form, granularity, group_size, shape)
    features = {f"quant_{name}": True, f"scale_per_{granularity}": True, "scale_given": scale is not None}
    if scale is not None:
        checks.need_tensor("scale", scale, floating=False)
        format_checks.need_scale_of("scale", scale, form, [scale_shape(shape, granularity, group_size)])
    format_checks.check_second_scale("tensor_scale", tensor_scale, form, ())
    checks.need_same_device("x", x, scale=scale, tensor_scale=tensor_scale)
    features["tensor_scale"] = tensor_scale is not None
    return describe("quantize", [x], {"N": x.numel() // width, "C": width, "S": group_size}, features)


def quantize_reference(
    x: Tensor,
    format: str,
    granularity: str,
    group_size: int,
    scale: Tensor | None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scale, round, clamp, in float32 for every dtype of x: all kernels give the same codes."""
    codes, used = round_to_format(x, ALL_FORMATS[format], granularity, group_size, scale, tensor_scale)
    return codes, used if scale is None else scale.clone()  # an operator's results are memory of their own


def _validate_values(args: Args) -> Args:
    """A scale of zero has no code for any number; one that is not finite is that of a row that is not."""
    for name, given in zip(("scale", "tensor_scale"), args[4:6], strict=True):
        if given is not None and checks.can_read_values(given):
            format_checks.check_scale_values(name, given.float().nan_to_num(nan=1.0, posinf=1.0))
    return args


def _codes_shape(shape: tuple[int, ...], form: Format) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // form.packed)


def _outputs(args: Args) -> tuple[OutputSpec, ...]:
    x, name, granularity, group_size, scale, _ = args
    shape, form = tuple(x.shape), ALL_FORMATS[name]
    dtype = form.scales[0] if scale is None else scale.dtype
    return (
        OutputSpec(_codes_shape(shape, form), checks.dtype_name(form.element.storage)),
        OutputSpec(scale_shape(shape, granularity, group_size), checks.dtype_name(dtype)),
    )


def _empty(args: Args) -> tuple[Tensor, Tensor] | None:
    x, name, granularity, group_size, scale, _ = args
    if x.numel():
        return None
    shape, form = tuple(x.shape), ALL_FORMATS[name]
    codes = x.new_empty(_codes_shape(shape, form), dtype=form.element.storage)
    # Nothing shares the scale of an empty tensor; any number gives nothing back.
    ones = torch.ones(scale_shape(shape, granularity, group_size), device=x.device)
    return codes, ones.to(form.scales[0]) if scale is None else scale.clone()


QUANTIZE = define_op(
    build=quantize,
    check=_check_quantize,
    reference=quantize_reference,
    outputs=_outputs,
    # A maximum, a division, a rounding; numbers move once, and codes as bytes.
    work=estimate(lambda N, C: (4 * N * C, N * C, N * C)),
    operands=(0,),
    exact_dims=frozenset({"C", "S"}),
    empty=_empty,
    validate_values=_validate_values,
    # One scale for the tensor or for a block's rows would become one scale for everybody's rows.
    batching=RowBatching(row_operands=(0, 4), accepts=lambda args: args[2] in ("row", "group")),
    differentiable=False,
    wide_outputs=frozenset({0, 1}),
)


@op_signature()
def dequantize(
    codes: Tensor,
    scale: Tensor,
    *,
    dtype: str = "float32",
    format: str | None = None,
    zero_point: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    block_size: int = 0,
) -> SignedCall:
    """Give back the numbers that `codes` and `scale` stand for.

    Args: codes (..., C) of int8, float8_e4m3fn or float8_e5m2, or uint8 (..., C / 2) of a packed format;
        scale in a dtype of the format, of shape (), (..., 1), (..., G), each of a row's G scales for C / G
        neighbours, or with block_size b (..., R / b, C / b) rounded up; dtype is the name of the result's;
        format is what the dtype of codes does not say; zero_point uint8 in scale's shape (int4);
        tensor_scale float32 () or one a matrix (nvfp4).
    Returns: (codes - zero_point) times scale times tensor_scale, multiplied in float32, (..., C). Numbers
        under a scale that is NaN or infinite, as `quantize` gives it for such numbers, are not finite. On a
        CPU a negative scale is refused, and zero where the format has none (nf4 and nvfp4 have).
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    """
    raise NotImplementedError


def _check_dequantize(args: Args) -> CallSpec:
    codes, scale, dtype, name, zero_point, tensor_scale, block_size = args
    form, shape = need_codes("codes", codes, name)
    checks.need_choice("dtype", dtype, FLOAT_NAMES)
    features, size = weight_features(form, shape, scale, zero_point, tensor_scale, block_size)
    checks.need_same_device("codes", codes, scale=scale, zero_point=zero_point, tensor_scale=tensor_scale)
    width = shape[-1]
    dims = {"N": codes.numel() // codes.shape[-1], "C": width, "S": size}
    return describe("dequantize", [codes], dims, features, dtype=dtype).replace(dtypes=(dtype,))


def dequantize_reference(*args: Any) -> Tensor:
    """Each code times its scales, in float32."""
    codes, scale, dtype, format, zero_point, tensor_scale, block_size = args
    wide = numbers(codes, scale, format, zero_point, tensor_scale, block_size, torch.float32)
    return wide.to(getattr(torch, dtype))


def numbers(
    codes: Tensor,
    scale: Tensor,
    format: str | None,
    zero_point: Tensor | None,
    tensor_scale: Tensor | None,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """What checked parts stand for, computed in `dtype`, float32 or float64."""
    form = FORMATS[FORMAT_OF[codes.dtype]] if format is None else ALL_FORMATS[format]
    granularity, size = layout_of_scale(scale, codes.shape[-1] * form.packed, block_size, form)
    return restore(codes, scale, form, granularity, size, zero_point, per_matrix(tensor_scale), dtype)


def _validate_dequantize(args: Args) -> Args:
    """What `quantize` would not give: the scale of a row that is not finite is not either."""
    codes, scale, _, name, zero_point, tensor_scale, _ = args
    for part, given in (("scale", scale), ("tensor_scale", tensor_scale)):
        if given is not None and checks.can_read_values(given):
            form = format_of(codes.dtype, name) if part == "scale" else None
            format_checks.check_scale_values(part, given.float().nan_to_num(nan=1.0, posinf=1.0), form)
    if zero_point is not None and checks.can_read_values(zero_point):
        format_checks.check_zero_point_values("zero_point", zero_point)
    return args


def _dequantize_outputs(args: Args) -> tuple[OutputSpec, ...]:
    codes, _, dtype, name, *_ = args
    packed = 1 if name is None else ALL_FORMATS[name].packed
    return (OutputSpec((*codes.shape[:-1], codes.shape[-1] * packed), dtype),)


def _rows_alone(args: Args) -> bool:
    """Whether each row of codes has scales of its own."""
    return bool(args[1].dim() > 0) and not args[6] and (args[5] is None or args[5].dim() == 0)


DEQUANTIZE = define_op(
    build=dequantize,
    check=_check_dequantize,
    reference=dequantize_reference,
    outputs=_dequantize_outputs,
    work=estimate(lambda N, C: (N * C, N * C, N * C)),
    operands=(0,),
    exact_dims=frozenset({"C", "S"}),
    validate_values=_validate_dequantize,
    batching=RowBatching(row_operands=(0, 1, 4), accepts=_rows_alone),
    differentiable=False,
    wide_outputs=frozenset({0}),
)
