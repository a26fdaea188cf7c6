"""What the norms share: their checks, the work they do, and their entries in the table of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, Op, define_op, output_like
from layerzero.ops.signature import SignedCall
from layerzero.spec.call_spec import CallSpec


def check_norm(op: str, args: Args, rows: int, names: tuple[str, ...]) -> CallSpec:
    """Validate and describe a norm: of its `rows` operands the second is the residual, vectors follow."""
    x, *vectors, eps = args[0], *args[rows:]
    named = dict(zip(names, vectors, strict=True))
    checks.need_rows("x", x)
    for residual in args[1:rows]:
        checks.need_tensor("residual", residual)
        checks.need_shape("residual", residual, x.shape, " like x")
        if residual.dtype != x.dtype:
            needs, got = checks.dtype_name(x.dtype), checks.dtype_name(residual.dtype)
            raise TypeError(f"residual needs x's dtype {needs}, got {got}")
        checks.need_same_device("x", x, residual=residual)
    for name, vector in named.items():
        checks.need_vector(name, vector, x.shape[-1], "x's last axis")
    checks.need_same_device("x", x, **named)
    checks.need_number("eps", eps, low=0.0)
    width = x.shape[-1]
    features = {"no_weight": named["weight"] is None, "bias": named.get("bias") is not None}
    return describe(op, args[:-1], {"N": x.numel() // width, "C": width}, features)


def widen(x: Tensor) -> Tensor:
    """Dense rows in float32 at least: torch sums rows in another order where a column is dense instead."""
    return (x if x.dtype == torch.float64 else x.float()).contiguous()


# Five operations an element, six with a residual; rows are read and written once, the weight is read.
_WORK = estimate(lambda N, C: (5 * N * C, 2 * N * C + C, 0))
_WORK_OF_SUM = estimate(lambda N, C: (6 * N * C, 4 * N * C + C, 0))


def _of_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A norm of a sum: the norm of x + residual, and the sum in x's dtype."""

    def reference(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *rest), total

    return reference


def register_norm(
    build: Callable[..., SignedCall],
    norm: Callable[..., Tensor],
    *,
    vectors: tuple[str, ...],
    residual: bool = False,
) -> Op:
    """Add a norm to the table of ops; with a residual that of the sum, which is the second output."""
    rows = (0, 1) if residual else (0,)
    return define_op(
        build=build,
        check=lambda args: check_norm(build.__name__, args, len(rows), vectors),
        reference=_of_sum(norm) if residual else norm,
        outputs=output_like(*[0] * len(rows)),
        work=_WORK_OF_SUM if residual else _WORK,
        operands=tuple(range(len(rows) + len(vectors))),
        exact_dims=frozenset({"C"}),
        castable=not residual,  # the sum that is normed is the one returned
        batching=RowBatching(row_operands=rows),
    )
