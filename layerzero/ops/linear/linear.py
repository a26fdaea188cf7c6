"""The affine map: linear."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, define_op
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate


@op_signature()
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> SignedCall:
    """Multiply each row of `x` by `weight` transposed and add `bias`.

    Args: x (..., K), any float dtype; weight (C, K); bias (C,) or None.
    Returns: (..., C) in x's dtype; products are summed in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """
    raise NotImplementedError


def check_linear(args: Args) -> CallSpec:
    """Validate and describe an affine map."""
    x, weight, bias = args
    checks.need_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x needs at least 1 dimension, got a scalar")
    width, inner = checks.need_product(x, weight, bias, "(C, K)")
    dims = {"N": math.prod(x.shape[:-1]), "C": width, "K": inner}
    return describe("linear", args, dims, {"bias": bias is not None})


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    shift = None if bias is None else bias.to(wide.dtype)
    return F.linear(wide, weight.to(wide.dtype), shift).to(x.dtype)


def contiguous_if_odd(x: Tensor) -> Tensor:
    """Rows as `torch.nn.functional.linear` may read them: dense where they are of odd length.

    oneDNN multiplies half precision in pairs (AMX, torch 2.13 CPU), and the element behind such a row of a
    larger matrix by zero: NaN there makes the row NaN.
    """
    return x.contiguous() if x.shape[-1] % 2 else x


def linear_work(spec: CallSpec) -> WorkEstimate:
    """A multiplication and an addition an element of the three-way product; every tensor moves once."""
    n, c, k = spec.dim("N"), spec.dim("C"), spec.dim("K")
    moved = n * k + c * k + n * c + (c if "bias" in spec.features else 0)
    return WorkEstimate(flops=2.0 * n * c * k, bytes=float(moved * checks.dtype_bytes(spec.dtype)))


def linear_outputs(args: Args) -> tuple[OutputSpec, ...]:
    """x's leading axes with the weight's rows, in x's dtype."""
    return (OutputSpec((*args[0].shape[:-1], args[1].shape[0]), checks.dtype_name(args[0].dtype)),)


def _empty(args: Args) -> Tensor | None:
    """No rows or no columns give nothing; a sum over no inputs is zero, so only the bias is left."""
    x, weight, bias = args
    if x.numel() and weight.numel():
        return None
    out: Tensor = x.new_zeros((*x.shape[:-1], weight.shape[0]))
    return out if bias is None or out.numel() == 0 else out + bias.to(out.dtype)


LINEAR = define_op(
    build=linear,
    check=check_linear,
    reference=linear_reference,
    outputs=linear_outputs,
    work=linear_work,
    operands=(0, 1, 2),
    exact_dims=frozenset({"C", "K"}),
    empty=_empty,
    batching=RowBatching(weights=(1, 2)),
)
