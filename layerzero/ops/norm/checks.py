"""What the norms share: their checks, the work they do, and their entries in the table of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, Op, define_op, output_like
from layerzero.ops.signature import SignedCall
from layerzero.spec.call_spec import CallSpec, WorkEstimate


def check_norm(op: str, args: Args, rows: int, names: tuple[str, ...]) -> CallSpec:
    """Validate and describe a norm: of its `rows` operands the second is the residual, vectors follow."""
    x, *vectors, eps = args[0], *args[rows:]
    named = dict(zip(names, vectors, strict=True))
    checks.need_rows("x", x)
    for residual in args[1:rows]:
        _check_residual(x, residual)
    for name, vector in named.items():
        checks.need_vector(name, vector, x.shape[-1], "x's last axis")
    checks.need_same_device("x", x, **named)
    checks.need_number("eps", eps, low=0.0)
    width = x.shape[-1]
    features = {"no_weight": named["weight"] is None, "bias": named.get("bias") is not None}
    return describe(op, args[:-1], {"N": x.numel() // width, "C": width}, features)


def _check_residual(x: Tensor, residual: Tensor) -> None:
    checks.need_tensor("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual needs x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if residual.dtype != x.dtype:
        needs, got = checks.dtype_name(x.dtype), checks.dtype_name(residual.dtype)
        raise TypeError(f"residual needs x's dtype {needs}, got {got}")
    checks.need_same_device("x", x, residual=residual)


def widen(x: Tensor) -> Tensor:
    """Dense rows in float32 at least: torch sums rows in another order where a column is dense instead."""
    return (x if x.dtype == torch.float64 else x.float()).contiguous()


def _work(spec: CallSpec) -> WorkEstimate:
    """Five operations an element, six with a residual; rows are read and written once, the weight is read."""
    n, c = spec.dim("N"), spec.dim("C")
    added = spec.op.startswith("add_")
    moved = (4 if added else 2) * n * c + c
    flops = (6.0 if added else 5.0) * n * c
    return WorkEstimate(flops=flops, bytes=float(moved * checks.dtype_bytes(spec.dtype)))


def register_norm(
    build: Callable[..., SignedCall],
    reference: Callable[..., Any],
    *,
    vectors: tuple[str, ...],
    residual: bool = False,
) -> Op:
    """Add a norm to the table of ops; with a residual it has two row operands and two outputs."""
    rows = (0, 1) if residual else (0,)
    return define_op(
        build=build,
        check=lambda args: check_norm(build.__name__, args, len(rows), vectors),
        reference=reference,
        outputs=output_like(*[0] * len(rows)),
        work=_work,
        operands=tuple(range(len(rows) + len(vectors))),
        exact_dims=frozenset({"C"}),
        castable=not residual,  # the sum that is normed is the one returned
        batching=RowBatching(row_operands=rows),
    )
