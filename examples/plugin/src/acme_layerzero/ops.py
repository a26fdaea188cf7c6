"""The op: its signature, what it takes, and what it means in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, Op, output_like
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate


@op_signature()
def acme_gate(x: Tensor, gate: Tensor) -> SignedCall:
    """Weigh `x` by the sigmoid of `gate`.

    Args: x and gate (..., C) of one shape and dtype.
    Returns: x's shape and dtype.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, gate = args
    checks.need_rows("x", x)
    checks.need_rows("gate", gate)
    if gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"gate needs x's {tuple(x.shape)} {x.dtype}, got {tuple(gate.shape)} {gate.dtype}")
    checks.need_same_device("x", x, gate=gate)
    return describe("acme_gate", (x, gate), {"N": x.numel() // x.shape[-1], "C": x.shape[-1]})


def _reference(x: Tensor, gate: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.sigmoid(gate.to(wide.dtype))).to(x.dtype)


def _work(spec: CallSpec) -> WorkEstimate:
    count = spec.dim("N") * spec.dim("C")
    return WorkEstimate(flops=4.0 * count, bytes=3.0 * count * checks.dtype_bytes(spec.dtype))


def ops() -> list[Op]:
    """What this distribution adds; the entry point names it."""
    return [
        Op(
            build=acme_gate,
            check=_check,
            reference=_reference,
            outputs=output_like(0),
            work=_work,
            operands=(0, 1),
            batching=RowBatching(row_operands=(0, 1)),  # rows of several callers may share a launch
        )
    ]
