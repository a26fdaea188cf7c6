"""Liger: Triton kernels for training, each with its backward, out of the `liger-kernel` package.

Several of its functions save memory by writing where the caller still reads: rope turns its operands in
place, the losses put the gradient where the logits were, the norms' backward may overwrite the gradient it
is given. What is called here works on copies of what is not ours.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.checks import dtype_bytes
from layerzero.ops.linear.mlp import gated_bytes
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel, loading

# Everything in float32 and one rounding at the end; "llama" rounds before the weight.
_WIDE = "gemma"
Run = Callable[..., Tensor]


def _ops() -> Any:
    return importlib.import_module("liger_kernel.ops")


@loading(lambda: _ops().LigerRMSNormFunction.apply)
def _rms_norm(apply: Run, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`LigerRMSNormFunction`, its backward not in place."""
    return apply(x, weight, eps, 0.0, _WIDE, False)


@loading(lambda: _ops().LigerFusedAddRMSNormFunction.apply)
def _add_rms_norm(
    apply: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`LigerFusedAddRMSNormFunction`: sum and norm in one launch."""
    normed, total = apply(x, residual, weight, eps, 0.0, _WIDE, False)
    return normed, total


@loading(lambda: _ops().LigerLayerNormFunction.apply)
def _layer_norm(apply: Run, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`LigerLayerNormFunction`, which knows no missing bias."""
    return apply(x, weight, torch.zeros_like(weight) if bias is None else bias, eps)


@loading(lambda: _ops().LigerRopeFunction.apply)
def _rope(
    apply: Any, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, _: bool, __: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`LigerRopeFunction` on copies, over one sequence of all tokens."""
    places = positions.reshape(-1)
    angles = (table.index_select(0, places).unsqueeze(0) for table in (cos, sin))
    turned = apply(_one_sequence(q), _one_sequence(k), *angles, None, 1, 2 * cos.shape[1])
    return tuple(t.transpose(1, 2).view(kind.shape) for t, kind in zip(turned, (q, k), strict=True))


def _one_sequence(x: Tensor) -> Tensor:
    """(..., H, D) as a copy (1, H, tokens, D) whose memory is in the order of tokens."""
    return x.reshape(1, -1, *x.shape[-2:]).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _gates() -> tuple[Any, Any]:
    swiglu = importlib.import_module("liger_kernel.ops.swiglu")
    return swiglu.LigerFusedGateUpSiLUMulFunction.apply, _ops().LigerGELUMulFunction.apply


@loading(_gates)
def _mlp(gates: Any, *args: Any) -> Tensor:
    """torch's projections around Liger's gate: swiglu takes the projection whole, geglu its halves."""
    x, w_up, w_down, b_up, b_down, activation = args
    silu, gelu = gates
    up = functional.linear(x, w_up, b_up)
    hidden = silu(up) if activation == "swiglu" else gelu(*up.chunk(2, -1))
    return functional.linear(hidden, w_down, b_down)


@loading(lambda: _ops().LigerCrossEntropyFunction.apply)
def _cross_entropy(apply: Any, *args: Any) -> Tensor:
    """`LigerCrossEntropyFunction` on a copy where it would write the gradient over the logits."""
    logits, target, weight, ignore_index, label_smoothing, reduction = args
    rows = logits.reshape(-1, logits.shape[-1])
    if logits.requires_grad:
        rows = rows.clone()
    result = apply(
        rows, target.reshape(-1).long(), weight, ignore_index, 0.0, label_smoothing, reduction, None,
        False, False, False,
    )  # fmt: skip
    return _as_asked(result[0], target, reduction, logits)


@loading(lambda: _ops().LigerFusedLinearCrossEntropyFunction.apply)
def _linear_cross_entropy(apply: Any, *args: Any) -> Tensor:
    """`LigerFusedLinearCrossEntropyFunction`: logits in chunks, weight gradients summed in float32."""
    x, weight, target, bias, ignore_index, label_smoothing, reduction = args
    result = apply(
        x.reshape(-1, x.shape[-1]), weight, target.reshape(-1).long(), bias, None, ignore_index, 0.0,
        label_smoothing, reduction, None, False, torch.float32,
    )  # fmt: skip
    return _as_asked(result[0], target, reduction, x)


def _as_asked(loss: Tensor, target: Tensor, reduction: str, like: Tensor) -> Tensor:
    """The loss in the op's shape and dtype; a row that is ignored has a loss of zero."""
    return (loss.view(target.shape) if reduction == "none" else loss).to(like.dtype)


def _logits_bytes(request: CallSpec) -> int:
    """A loss and a count of each row; the copy of the logits that becomes their gradient."""
    n, v = request.dim("N"), request.dim("V")
    return 8 * n + (dtype_bytes(request.dtype) * n * v if "grad" in request.modes else 0)


def _chunk_bytes(request: CallSpec) -> int:
    """One chunk of logits, as many elements as its inputs have, and gradients: inputs', and the weight's.

    Chunks are powers of two of rows, so that one may be twice as large as asked for.
    """
    n, k, v = request.dim("N"), request.dim("K"), request.dim("V")
    size = dtype_bytes(request.dtype)
    rows = min(n, 2 * -(-n * k // v) + 1)
    chunk = rows * v * (size + (4 if "bias" in request.features else 0))
    return chunk + n * (k * size + 4) + ((v * k + v) * (4 + size) if "grad" in request.modes else 0)


_kernel = functools.partial(
    Kernel.of,
    measured="benchmarks/results/rows_h200.json",
    source="liger-kernel 0.8.5's sources; run on one H200, torch 2.11",
    platforms="cuda rocm",
    sm_min=80,
    dtypes="float32 float16 bfloat16",
    autocast=False,
    tie_break_order=45,
    slow_import=True,
    distributions=("liger-kernel>=0.8,<0.9",),
)
_WIDTH = "C <= 65536 else WIDTH_TOO_LARGE"

KERNELS: tuple[Kernel, ...] = (
    _kernel("liger.rms_norm.triton", _rms_norm, (0.1, 0.62, 46.0), features="no_weight", limits=(_WIDTH,)),
    _kernel("liger.add_rms_norm.triton", _add_rms_norm, (0.1, 0.86, 45.0), limits=(_WIDTH,)),
    _kernel(
        "liger.layer_norm.triton", _layer_norm, (0.1, 0.7, 40.0), features="bias", limits=(_WIDTH, "C >= 2")
    ),
    _kernel(
        "liger.rope.triton", _rope, (0.1, 0.36, 96.0), features="partial_rotary", limits=("R % 2 == 0",)
    ),
    _kernel(
        "liger.mlp.gate", _mlp, (0.625, 0.62, 24.0), features="bias act_swiglu act_geglu_tanh",
        limits=("F <= 65536 else WIDTH_TOO_LARGE",), workspace_bytes=gated_bytes,
    ),
    _kernel(
        "liger.cross_entropy.triton", _cross_entropy, (0.2, 0.48, 70.0),
        features="label_smoothing class_weights", workspace_bytes=_logits_bytes,
    ),
    _kernel(
        "liger.linear_cross_entropy.chunked", _linear_cross_entropy, (0.6, 0.6, 150.0),
        features="bias label_smoothing", workspace_bytes=_chunk_bytes,
    ),
)  # fmt: skip
