"""The residual sum, its norm and the rounding to eight bits in one op: add_rms_norm_quantize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import estimate
from layerzero.ops.norm.rms_norm import ADD_RMS_NORM, rms_norm_reference
from layerzero.ops.op import Args, define_op
from layerzero.ops.quantize.quantize import FORMATS, quantize_reference, scale_shape
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec

GRANULARITIES = ("row", "group")


@op_signature()
def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    format: str = "fp8_e4m3",
    granularity: str = "row",
    group_size: int = 0,
) -> SignedCall:
    """Add `residual` to `x`, normalise the sum and round it to eight-bit codes.

    Args: x and residual (..., C) of one shape and dtype; weight (C,) or None; format is int8, fp8_e4m3 or
        fp8_e5m2; granularity is row, or group of group_size neighbours of a row, which divides C.
    Returns: (codes, scale, x + residual): codes in x's shape; scale float32 of shape (..., 1) or
        (..., C / group_size), the largest magnitude of what shares it over the format's largest; the sum in
        x's dtype, which is what is normalised. Codes may differ by one between kernels, since the norm that
        is rounded is in float32 and sums in any order.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467 and 2208.07339.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, _, _, _, form, granularity, group_size = args
    spec = ADD_RMS_NORM.check(args[:4])
    checks.need_choice("format", form, FORMATS)
    checks.need_choice("granularity", granularity, GRANULARITIES)
    if granularity == "group":
        checks.need_int("group_size", group_size, low=1)
        if x.shape[-1] % group_size:
            raise ValueError(f"group_size needs to divide x's last axis of {x.shape[-1]}, got {group_size}")
    elif checks.need_int("group_size", group_size) != 0:
        raise ValueError(f"group_size needs 0 for granularity={granularity!r}, got {group_size!r}")
    return spec.replace(
        op="add_rms_norm_quantize",
        dims={**spec.dims, "S": group_size},
        features=spec.features | {f"quant_{form}", f"scale_per_{granularity}"},
    )


def add_rms_norm_quantize_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The sum in x's dtype, its norm in float32 at least, then `quantize_reference` of that."""
    x, residual, weight, eps, format, granularity, group_size = args
    total = x + residual
    wide = total if total.dtype == torch.float64 else total.float()
    normed = rms_norm_reference(wide, weight, eps)
    return (*quantize_reference(normed, format, granularity, group_size, None), total)


def _outputs(args: Args) -> tuple[OutputSpec, ...]:
    x, _, _, _, form, granularity, group_size = args
    shape = tuple(x.shape)
    return (
        OutputSpec(shape, checks.dtype_name(FORMATS[form].element.storage)),
        OutputSpec(scale_shape(shape, granularity, group_size), "float32"),
        OutputSpec(shape, checks.dtype_name(x.dtype)),
    )


ADD_RMS_NORM_QUANTIZE = define_op(
    build=add_rms_norm_quantize,
    check=_check,
    reference=add_rms_norm_quantize_reference,
    outputs=_outputs,
    # Two operands are read, the sum and codes of a byte are written.
    work=estimate(lambda N, C: (10 * N * C, 3 * N * C + C, N * C)),
    operands=(0, 1, 2),
    exact_dims=frozenset({"C", "S"}),
    castable=False,
    batching=RowBatching(row_operands=(0, 1)),
    differentiable=False,
    wide_outputs=frozenset({0, 1}),
)
