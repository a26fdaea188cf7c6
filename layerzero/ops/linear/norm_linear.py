"""A norm and the affine map of it in one op: rms_norm_linear."""

from __future__ import annotations

from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.linear.linear import check_linear, linear_outputs, linear_reference, linear_work
from layerzero.ops.norm.checks import widen
from layerzero.ops.norm.rms_norm import rms_norm_reference
from layerzero.ops.op import Args, define_op
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate


@op_signature()
def rms_norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6
) -> SignedCall:
    """Scale each row of `x` to unit root mean square, times `norm_weight`, and multiply it by `weight`.

    Args: x (..., K), any float dtype; norm_weight (K,) or None; weight (C, K) and bias (C,) or None as
        `linear` has them; eps is added to the mean square.
    Returns: (..., C) in x's dtype; a kernel need not round the rows in between to it.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, norm_weight, weight, bias, eps = args
    checks.need_rows("x", x)
    product = check_linear((x, weight, bias))
    checks.need_vector("norm_weight", norm_weight, x.shape[-1], "x's last axis")
    checks.need_same_device("x", x, norm_weight=norm_weight)
    checks.need_number("eps", eps, low=0.0)
    features = {"bias": bias is not None, "no_weight": norm_weight is None}
    return describe("rms_norm_linear", args[:4], dict(product.dims), features)


def rms_norm_linear_reference(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """The product of the norm's rows, which stay in float32 at least."""
    return linear_reference(rms_norm_reference(widen(x), norm_weight, eps), weight, bias).to(x.dtype)


def _work(spec: CallSpec) -> WorkEstimate:
    """The product's, and five operations an element of the rows; the norm's weight is read."""
    product, width = linear_work(spec), spec.dim("K")
    moved = width * checks.dtype_bytes(spec.dtype)
    return WorkEstimate(product.flops + 5.0 * spec.dim("N") * width, product.bytes + moved)


RMS_NORM_LINEAR = define_op(
    build=rms_norm_linear,
    check=_check,
    reference=rms_norm_linear_reference,
    outputs=lambda args: linear_outputs((args[0], args[2])),
    work=_work,
    operands=(0, 1, 2, 3),
    exact_dims=frozenset({"C", "K"}),
    batching=RowBatching(weights=(1, 2, 3)),
)
