"""The affine map over quantized weights: quantized_linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.formats.rounding import restore, round_to_format
from layerzero.formats.table import FORMATS, format_of
from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.linear.linear import linear_outputs
from layerzero.ops.op import Args, define_op
from layerzero.ops.quantize.operands import inputs_feature, need_codes, need_part_values, weight_features
from layerzero.ops.quantize.quantize import numbers
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate


@op_signature()
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: str = "float",
    format: str | None = None,
    zero_point: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    block_size: int = 0,
) -> SignedCall:
    """Multiply each row of `x` by a quantized `weight` transposed and add `bias`.

    Args: x (..., K), any float dtype; weight (C, K) of int8, float8_e4m3fn or float8_e5m2, or of a packed
        format uint8 (C, K / 2); scale in a dtype of the format, of shape (), (C, 1), (C, G) or, with
        block_size b, (C / b, K / b) rounded up, as `quantize` gives them; bias (C,) or None; format is what
        the dtype of weight does not say; zero_point uint8 in scale's shape (int4), 8 where None; tensor_scale
        float32 () (nvfp4). inputs is float, where x is used as it is; dynamic, where rows of x are first
        rounded to weight's format, with scales by row, by the format's groups, or by block_size neighbours;
        or int8 or fp8_e4m3, to which rows are rounded with a scale each.
    Returns: (..., C) in x's dtype; int8 products are summed exactly, others in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    Source: arXiv 2208.07339 for rows that are quantized as they come; arXiv 2412.19437 for blocks.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, weight, scale, bias, inputs, name, zero_point, tensor_scale, block_size = args
    checks.need_rows("x", x)
    form, shape = need_codes("weight", weight, name, rank=2)
    width, inner = shape
    if width == 0:
        raise ValueError(f"weight needs at least 1 row, got shape {tuple(weight.shape)}")
    checks.need_like("x", "a last axis of {}", x.shape[-1], inner, "weight's (C, K)")
    features, size = weight_features(form, shape, scale, zero_point, tensor_scale, block_size)
    features.add(inputs_feature(inputs, form))
    checks.need_vector("bias", bias, width, "weight's rows")
    features |= {"bias"} if bias is not None else set()
    others = {"weight": weight, "scale": scale, "bias": bias, "zero_point": zero_point}
    checks.need_same_device("x", x, **others, tensor_scale=tensor_scale)
    dims = {"N": x.numel() // inner, "C": width, "K": inner, "S": size or inner}
    typed = [x] if bias is None else [x, bias]
    return describe("quantized_linear", [x], dims, features, typed=typed, aligned=[weight])


def _validate_values(args: Args) -> Args:
    """Scales and zero points, the first time that a weight comes."""
    form = format_of(args[1].dtype, args[5])
    need_part_values(("scale", "zero_point", "tensor_scale"), (args[2], args[6], args[7]), form)
    return args


def rounded_rows(x: Tensor, inputs: str, weight: torch.dtype, format: str | None, block_size: int) -> Tensor:
    """Rows after the rounding that `inputs` asks for, in float32, or float64 where x is."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    if inputs == "float":
        return x.to(kind)
    form = format_of(weight, format) if inputs == "dynamic" else FORMATS[inputs]
    granularity, size = "row", 0
    if inputs == "dynamic" and form.granularities[0] == "group":
        granularity, size = "group", form.group_sizes[0]
    elif inputs == "dynamic" and block_size:
        granularity, size = "block", block_size
    if granularity == "block":  # a row at a time: a block of one row
        row_count, width = x.numel() // x.shape[-1], x.shape[-1]
        rows = x.reshape(row_count, 1, width)
        return restore(
            *round_to_format(rows, form, granularity, size), form, granularity, size, dtype=kind
        ).view(x.shape)
    return restore(*round_to_format(x, form, granularity, size), form, granularity, size, dtype=kind)


def quantized_linear_reference(*args: Any) -> Tensor:
    """(x, perhaps rounded) @ (weight's numbers)^T + bias, in float32 at least."""
    x, weight, scale, bias, inputs, format, zero_point, tensor_scale, block_size = args
    rows = rounded_rows(x, inputs, weight.dtype, format, block_size)
    wide = numbers(weight, scale, format, zero_point, tensor_scale, block_size, rows.dtype)
    shift = None if bias is None else bias.to(rows.dtype)
    return F.linear(rows, wide, shift).to(x.dtype)


def code_bits(features: frozenset[str]) -> int:
    """Bits of a code of the format that a spec names."""
    return next((form.element.bits for form in FORMATS.values() if f"quant_{form.name}" in features), 8)


def _work(spec: CallSpec) -> WorkEstimate:
    """The product of `linear`; codes are read as they are packed, with their scales."""
    n, c, k = spec.dim("N"), spec.dim("C"), spec.dim("K")
    element, groups = checks.dtype_bytes(spec.dtype), max(1, k // spec.dim("S", k))
    moved = (n * k + n * c) * element + c * k * code_bits(spec.features) / 8 + 4 * c * groups
    return WorkEstimate(flops=2.0 * n * c * k, bytes=float(moved))


QUANTIZED_LINEAR = define_op(
    build=quantized_linear,
    check=_check,
    reference=quantized_linear_reference,
    outputs=linear_outputs,
    work=_work,
    operands=(0, 3),  # a cast must not touch the weight's codes
    uncopied_operands=(1,),
    exact_dims=frozenset({"C", "K", "S"}),
    validate_values=_validate_values,
    batching=RowBatching(),
    differentiable=False,
)
