"""The affine map over eight-bit weights: quantized_linear."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, Op, register
from layerzero.ops.quantize.quantize import FORMAT_OF, decode, need_codes, need_scale, quantize_reference
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate

INPUTS = ("float", "dynamic")


@op_signature()
def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, inputs: str = "float"
) -> SignedCall:
    """Multiply each row of `x` by an eight-bit `weight` transposed and add `bias`.

    Args: x (..., K), any float dtype; weight (C, K) of int8, float8_e4m3fn or float8_e5m2 and its scale in
        float32, (), (C, 1) or (C, G), as `quantize` gives them; bias (C,) or None. inputs is float, where x
        is used as it is, or dynamic, where each row of x is first quantized to weight's format.
    Returns: (..., C) in x's dtype; int8 products are summed exactly, others in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2208.07339 for rows that are quantized as they come.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, weight, scale, bias, inputs = args
    checks.need_rows("x", x)
    need_codes("weight", weight, rank=2)
    width, inner = weight.shape
    if width == 0:
        raise ValueError(f"weight needs at least 1 row, got shape {tuple(weight.shape)}")
    if x.shape[-1] != inner:
        raise ValueError(f"x needs a last axis of {inner} like weight's (C, K), got {x.shape[-1]}")
    checks.need_tensor("scale", scale)
    groups = scale.shape[-1] if scale.dim() else 1
    divides = groups >= 1 and inner % groups == 0
    need_scale("scale", scale, (), (width, groups if divides else 1))
    checks.need_choice("inputs", inputs, INPUTS)
    if bias is not None:
        checks.need_vector("bias", bias, width, "weight's rows")
    checks.need_same_device("x", x, weight=weight, scale=scale, bias=bias)
    granularity = "tensor" if scale.dim() == 0 else "row" if groups == 1 else "group"
    kind = "inputs_quantized" if inputs == "dynamic" else "inputs_float"
    features = {f"quant_{FORMAT_OF[weight.dtype]}", f"scale_per_{granularity}", kind}
    features |= set() if bias is None else {"bias"}
    return describe(
        "quantized_linear",
        [x],
        {"N": x.numel() // inner, "C": width, "K": inner, "S": inner // groups},
        features,
        typed=[x] if bias is None else [x, bias],
        aligned=[weight],
    )


def quantized_linear_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, inputs: str
) -> Tensor:
    """(x, perhaps through eight bits) @ (weight * scale)^T + bias, in float32 at least."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(kind)
    if inputs == "dynamic":
        codes, spread = quantize_reference(x, FORMAT_OF[weight.dtype], "row", 0, None)
        rows = codes.to(kind) * spread.to(kind)
    shift = None if bias is None else bias.to(kind)
    return F.linear(rows, decode(weight, scale.to(kind)), shift).to(x.dtype)


def _work(spec: CallSpec) -> WorkEstimate:
    """The product of `linear`; weights are read as bytes."""
    n, c, k = spec.dim("N"), spec.dim("C"), spec.dim("K")
    element = checks.dtype_bytes(spec.dtype)
    return WorkEstimate(flops=2.0 * n * c * k, bytes=float((n * k + n * c) * element + c * k + 4 * c))


QUANTIZED_LINEAR = register(
    Op(
        build=quantized_linear,
        check=_check,
        reference=quantized_linear_reference,
        outputs=lambda args: (
            OutputSpec((*args[0].shape[:-1], args[1].shape[0]), checks.dtype_name(args[0].dtype)),
        ),
        work=_work,
        operands=(0, 3),  # a cast must not touch the weight's codes
        uncopied_operands=(1,),
        exact_dims=frozenset({"C", "K", "S"}),
        batching=RowBatching(),
        differentiable=False,
    )
)
