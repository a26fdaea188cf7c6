"""The last projection and its loss in one: linear_cross_entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from layerzero.ops import checks
from layerzero.ops.describe import describe, estimate
from layerzero.ops.linear import cross_entropy as losses
from layerzero.ops.op import Args
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec


@op_signature()
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: IndexTensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> SignedCall:
    """The negative log likelihood of each row's target class, from the rows before the last projection.

    Args: x (..., K), any float dtype; weight (V, K); target (...), int32 or int64 class ids; bias (V,) or
        None; the others as in `cross_entropy`. A kernel need never hold all logits, (..., V), at once.
    Returns: a scalar, or (...) for reduction="none", in x's dtype, and float32 under autocast; log and sums
        are float32.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a target out of range.
    Source: arXiv 2410.10989, section 3.2.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, weight, target, bias, ignore_index, label_smoothing, reduction = args
    checks.need_rows("x", x)
    classes, inner = checks.need_product(x, weight, bias, "(V, K)", rows=1)
    checks.need_index("target", target)
    checks.need_shape("target", target, x.shape[:-1], " like x without its last axis")
    checks.need_same_device("x", x, target=target)
    losses.need_loss_options(ignore_index, label_smoothing)
    checks.need_choice("reduction", reduction, losses.REDUCTIONS)
    dims = {"N": target.numel(), "K": inner, "V": classes}
    features = {"bias": bias is not None, "label_smoothing": label_smoothing > 0}
    return describe("linear_cross_entropy", args[:4], dims, features)


def linear_cross_entropy_reference(*args: Any) -> Tensor:
    """`cross_entropy_reference` of the product in float32 at least."""
    x, weight, target, bias, *options = args
    wide = x if x.dtype.itemsize == 8 else x.float()
    logits = F.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
    return losses.cross_entropy_reference(logits, target, None, *options).to(x.dtype)


# The product, then four operations a logit; logits move not at all.
_work = estimate(lambda N, K, V: (2 * N * K * V + 4 * N * V, N * K + V * K, 12 * N))

LINEAR_CROSS_ENTROPY = losses.register_loss(
    linear_cross_entropy, _check, linear_cross_entropy_reference, _work, operands=(0, 1, 3), target=2,
    classes=lambda args: (args[1].shape[0], "weight's rows"), exact_dims=frozenset({"K", "V"}),
)  # fmt: skip
