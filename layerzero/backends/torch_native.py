"""torch's own eager functions: what one would call without this library.

They work in the operands' dtype; torch accumulates half precision in float32 inside each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.kernel import ACTIVATIONS, INDEX_DTYPES, Capability, Efficiency, Kernel
from layerzero.ops.mlp import activate


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`torch.nn.functional.rms_norm` over the last axis."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, then its norm: two launches."""
    total = x + residual
    return functional.rms_norm(total, x.shape[-1:], weight, eps), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last axis."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`."""
    return functional.linear(x, weight, bias)


def mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str
) -> Tensor:
    """Projection, activation, projection; what stands between has the operands' dtype."""
    return functional.linear(activate(functional.linear(x, w_up, b_up), activation), w_down, b_down)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """`torch.nn.functional.embedding`."""
    return functional.embedding(ids, weight, padding_idx)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` on the last axis, in float32 where the logits are half precision.

    In half precision torch rounds every log-probability before it sums them up.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    wide = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    scale = None if weight is None else weight.to(wide.dtype)
    loss = functional.cross_entropy(
        wide,
        target.reshape(-1).long(),
        scale,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return (loss.view(target.shape) if reduction == "none" else loss).to(logits.dtype)


def _native(
    op: str,
    function: Callable[..., Any],
    efficiency: Efficiency,
    *,
    features: frozenset[str] = frozenset(),
    batch_invariant: bool = False,
) -> Kernel:
    return Kernel(
        id=f"torch.{op}.native",
        op=op,
        backend="torch",
        capability=Capability(
            source="torch.nn.functional; run against float64 on torch 2.13 CPU",
            features=features,
            index_dtypes=INDEX_DTYPES,
            batch_invariant=batch_invariant,
            graph_safe=True,
        ),
        load=lambda: function,
        efficiency=efficiency,
        rank=40,
        default=True,
    )


_ACTIVATIONS = frozenset(f"act_{name}" for name in ACTIVATIONS)
_PADDING = frozenset({"padding_idx"})
_BIAS = frozenset({"bias"})
_NO_WEIGHT = frozenset({"no_weight"})

KERNELS: tuple[Kernel, ...] = (
    _native("rms_norm", rms_norm, Efficiency(0.1, 0.5, 6.0, "estimate"), features=_NO_WEIGHT),
    _native("add_rms_norm", add_rms_norm, Efficiency(0.1, 0.35, 8.0, "estimate"), features=_NO_WEIGHT),
    _native("layer_norm", layer_norm, Efficiency(0.1, 0.6, 5.0, "estimate"), features=_NO_WEIGHT | _BIAS),
    _native("linear", linear, Efficiency(0.6, 0.7, 4.0, "estimate"), features=_BIAS),
    _native("mlp", mlp, Efficiency(0.5, 0.5, 10.0, "estimate"), features=_ACTIVATIONS | _BIAS),
    _native("embedding", embedding, Efficiency(0.1, 0.4, 4.0, "estimate"), features=_PADDING),
    _native(
        "cross_entropy",
        cross_entropy,
        Efficiency(0.1, 0.2, 20.0, "estimate"),
        features=frozenset({"label_smoothing", "class_weights"}),
    ),
)
