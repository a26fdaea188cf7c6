"""The loss of a classifier or language model: cross_entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, Op, define_op
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate

REDUCTIONS = ("mean", "sum", "none")


@op_signature()
def cross_entropy(
    logits: Tensor,
    target: IndexTensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> SignedCall:
    """The negative log likelihood of each row's target class.

    Args: logits (..., V), classes last, any float dtype; target (...), int32 or int64 class ids; weight (V,)
        scales each class; rows whose target is ignore_index count nothing; label_smoothing in [0, 1] moves
        that share of the target to all classes alike; reduction is mean, sum or none. The mean divides by
        the weights of the rows that count, so that it is NaN where none counts.
    Returns: a scalar, or (...) for reduction="none", in logits' dtype, and float32 under autocast; log
        and sums are float32.
    Raises: ValueError, TypeError: an argument does not fit, by name; class probabilities as target are not
        taken; on the CPU also a target out of range, with its position.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    logits, target, weight, ignore_index, label_smoothing, reduction = args
    checks.need_rows("logits", logits)
    if isinstance(target, Tensor) and target.dtype.is_floating_point:
        got = checks.dtype_name(target.dtype)
        raise TypeError(
            f"target needs class ids, int32 or int64; class probabilities are not taken, got {got}"
        )
    checks.need_index("target", target)
    checks.need_shape("target", target, logits.shape[:-1], " like logits without its last axis")
    classes = logits.shape[-1]
    checks.need_vector("weight", weight, classes, "logits' last axis")
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "weight needs to require no grad (weight.detach(), or torch.no_grad()): losses have no "
            "gradient for the weights of their classes"
        )
    checks.need_same_device("logits", logits, target=target, weight=weight)
    need_loss_options(ignore_index, label_smoothing)
    checks.need_choice("reduction", reduction, REDUCTIONS)
    features = {"label_smoothing": label_smoothing > 0, "class_weights": weight is not None}
    return describe("cross_entropy", (logits, target, weight), {"N": target.numel(), "V": classes}, features)


def cross_entropy_reference(*args: Any) -> Tensor:
    """`torch.nn.functional.cross_entropy` over flat rows, in float32 at least; under autocast so is the loss.

    In half precision torch rounds every log-probability before it sums them up.
    """
    logits, target, weight, ignore_index, label_smoothing, reduction = args
    rows = logits.reshape(-1, logits.shape[-1])
    wide = rows if rows.dtype == torch.float64 else rows.float()
    scale = None if weight is None else weight.to(wide.dtype)
    loss = F.cross_entropy(
        wide,
        target.reshape(-1).long(),
        scale,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    kind = logits.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        loss = loss.to(logits.dtype)
    return loss.reshape(target.shape) if reduction == "none" else loss


def need_loss_options(ignore_index: Any, label_smoothing: Any) -> None:
    """What every loss takes beside its tensors and its reduction."""
    checks.need_int("ignore_index", ignore_index)
    checks.need_number("label_smoothing", label_smoothing, low=0.0, high=1.0)


def register_loss(
    build: Callable[..., SignedCall],
    check: Callable[[Args], CallSpec],
    reference: Callable[..., Tensor],
    work: Callable[[CallSpec], WorkEstimate],
    *,
    operands: tuple[int, ...],
    target: int,
    classes: Callable[[Args], tuple[int, str]],
    exact_dims: frozenset[str],
) -> Op:
    """Add a loss of the rows in its first argument to the table of ops.

    `target` is the position of the classes' ids, of which `classes` says how many there are and where that
    is from; ignore_index, label_smoothing and reduction come last.
    """

    def shape(args: Args) -> tuple[int, ...]:
        return tuple(args[target].shape) if args[-1] == "none" else ()

    def validate_values(args: Args) -> Args:
        ids = checks.ids_in_range("target", args[target], *classes(args), ignore=args[-3])
        return *args[:target], ids, *args[target + 1 :]

    def empty(args: Args) -> Tensor | None:
        """No row: nothing, a sum of zero, or the mean of nothing, which is NaN."""
        value = 0.0 if args[-1] == "sum" else math.nan
        return None if args[target].numel() else args[0].new_full(shape(args), value)

    return define_op(
        build=build,
        check=check,
        reference=reference,
        outputs=lambda args: (OutputSpec(shape(args), checks.dtype_name(args[0].dtype)),),
        work=work,
        operands=operands,
        exact_dims=exact_dims,
        empty=empty,
        validate_values=validate_values,
        # A mean or a sum over the rows of all callers is the loss of none.
        batching=RowBatching(
            row_operands=(0, target),
            trailing_axes=(1, 0),
            output_trailing_axes=0,
            accepts=lambda args: bool(args[-1] == "none"),
        ),
    )


# Maximum, exponential, sum and logarithm; logits are read once.
_work = estimate(lambda N, V: (4 * N * V, N * V, 12 * N))

CROSS_ENTROPY = register_loss(
    cross_entropy, _check, cross_entropy_reference, _work, operands=(0, 1, 2), target=1,
    classes=lambda args: (args[0].shape[-1], "logits' classes"), exact_dims=frozenset({"V"}),
)  # fmt: skip
