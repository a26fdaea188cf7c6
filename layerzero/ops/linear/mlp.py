"""The feed-forward block of a transformer: mlp, gated and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, define_op, output_like
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": F.relu,
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@op_signature()
def mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str = "swiglu",
) -> SignedCall:
    """Project each row of `x` up to F, apply `activation`, project down again.

    Args: x (..., C), any float dtype; w_down (C, F). Gated kinds (swiglu, geglu, geglu_tanh, reglu): w_up
        (2F, C), the gate's F rows above the F rows it multiplies; plain kinds (gelu, gelu_tanh, silu, relu):
        w_up (F, C). b_up has as many elements as w_up has rows, b_down (C,). geglu and gelu use the exact
        erf, geglu_tanh and gelu_tanh its approximation.
    Returns: x's shape and dtype; a kernel may round hidden rows to that dtype in between.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2002.05202 for the gated kinds.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, w_up, w_down, b_up, b_down, activation = args
    checks.need_choice("activation", activation, (*GATES, *PLAIN))
    checks.need_rows("x", x)
    checks.need_weight("w_up", w_up, rank=2)
    checks.need_weight("w_down", w_down, rank=2)
    width, hidden = x.shape[-1], w_down.shape[1]
    if hidden == 0:
        raise ValueError(f"w_down needs at least 1 column, got shape {tuple(w_down.shape)}")
    checks.need_like("w_down", "{} rows", w_down.shape[0], width, "x's last axis")
    rows = 2 * hidden if activation in GATES else hidden
    meant = "(2F, C)" if activation in GATES else "(F, C)"
    checks.need_shape("w_up", w_up, (rows, width), f", {meant} for {activation}")
    checks.need_vector("b_up", b_up, rows, "w_up's rows")
    checks.need_vector("b_down", b_down, width, "w_down's rows")
    checks.need_same_device("x", x, w_up=w_up, w_down=w_down, b_up=b_up, b_down=b_down)
    features = {f"act_{activation}": True, "bias": b_up is not None or b_down is not None}
    return describe("mlp", args[:5], {"N": x.numel() // width, "C": width, "F": hidden}, features)


def mlp_reference(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str
) -> Tensor:
    """down(activate(up(x))), in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    up = F.linear(wide, w_up.to(wide.dtype), None if b_up is None else b_up.to(wide.dtype))
    hidden = activate(up, activation)
    down = F.linear(hidden, w_down.to(wide.dtype), None if b_down is None else b_down.to(wide.dtype))
    return down.to(x.dtype)


def activate(up: Tensor, activation: str) -> Tensor:
    """The hidden rows of an mlp, (..., F), of (..., 2F) for gated kinds and of (..., F) for plain ones."""
    if activation in GATES:
        gate, value = up.chunk(2, dim=-1)
        return GATES[activation](gate) * value
    return PLAIN[activation](up)


def _work(spec: CallSpec) -> WorkEstimate:
    """Both projections; rows and weights move once, hidden rows not at all."""
    n, c, f = spec.dim("N"), spec.dim("C"), spec.dim("F")
    gated = any(f"act_{name}" in spec.features for name in GATES)
    weights = (3 if gated else 2) * c * f
    return WorkEstimate(
        flops=2.0 * n * weights, bytes=float((2 * n * c + weights) * checks.dtype_bytes(spec.dtype))
    )


def gated_bytes(spec: CallSpec) -> int:
    """What a gated kind that goes by steps holds: the projection with both halves, and the gated half."""
    return 3 * checks.dtype_bytes(spec.dtype) * spec.dim("N") * spec.dim("F")


MLP = define_op(
    build=mlp,
    check=_check,
    reference=mlp_reference,
    outputs=output_like(0),
    work=_work,
    operands=(0, 1, 2, 3, 4),
    exact_dims=frozenset({"C", "F"}),
    batching=RowBatching(weights=(1, 2, 3, 4)),
)
