"""torch's own eager functions: what one would call without this library.

They work in the operands' dtype; torch accumulates half precision in float32 inside each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.native import FAST_PATH, is_product
from layerzero.ops.linear.cross_entropy import cross_entropy_reference
from layerzero.ops.linear.embedding import embedding_reference
from layerzero.ops.linear.linear import contiguous_if_odd
from layerzero.ops.linear.mlp import activate
from layerzero.ops.norm.layer_norm import layer_norm_reference
from layerzero.ops.norm.rms_norm import rms_norm_reference
from layerzero.ops.paged import append
from layerzero.spec.capability import ACTIVATIONS
from layerzero.spec.kernel import Kernel


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`torch.nn.functional.rms_norm` over the last axis of dense rows, whose sums it takes in one order."""
    if not x.is_contiguous():
        x = x.contiguous()
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, then its norm, in float32 beside a weight of another dtype: two launches."""
    total = x + residual
    if weight is None or weight.dtype is total.dtype:
        return rms_norm(total, weight, eps), total
    return rms_norm_reference(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last axis."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum, then its norm, in float32 beside a weight or bias of another dtype: two launches."""
    total = x + residual
    dtype = total.dtype
    if (weight is None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype):
        return functional.layer_norm(total, x.shape[-1:], weight, bias, eps), total
    return layer_norm_reference(total, weight, bias, eps), total


@is_product
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, for dense rows by the product alone that it makes of them."""
    if bias is None and (native := FAST_PATH.module) is not None:
        out: Tensor = native.product(x, weight)
        if out is not NotImplemented:
            return out
    return functional.linear(x if x.is_contiguous() else contiguous_if_odd(x), weight, bias)


def mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str
) -> Tensor:
    """Projection, activation, projection; the value between them has the operands' dtype."""
    return linear(activate(linear(x, w_up, b_up), activation), w_down, b_down)


def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layout: str, *_: None
) -> Tensor:
    """One copy by index a pool, over its tokens where they are adjacent; no pool of codes."""
    args = (k, v, k_cache, v_cache, slot_mapping, layout, None, None)
    if layout != "NHD" or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return append.append_kv_reference(*args)
    append.validate_values(args)
    k, v = append.copy_if_aliased(k, k_cache, v_cache), append.copy_if_aliased(v, k_cache, v_cache)
    for pool, rows in ((k_cache, k), (v_cache, v)):
        pool.flatten(0, 1).index_copy_(0, slot_mapping.long(), rows.to(pool.dtype))
    return slot_mapping


def linear_cross_entropy(*args: Any) -> Tensor:
    """The projection in the operands' dtype, then the loss: all logits are written and read."""
    x, weight, target, bias, *options = args
    return cross_entropy_reference(linear(x, weight, bias), target, None, *options)


def _each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of every row alone, from a buffer of its own alignment: the same bits in every batch.

    Matrix libraries choose their blocking, and with it the order of their sums, by the number of rows.
    """
    out = torch.cat([function(row.clone()) for row in x.reshape(-1, 1, x.shape[-1])])
    return out.view(*x.shape[:-1], out.shape[-1])


def linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` row by row: slow, and what strict determinism costs."""
    return _each_row(lambda row: functional.linear(row, weight, bias), x)


def mlp_by_row(
    x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str
) -> Tensor:
    """`mlp` row by row."""
    return _each_row(lambda row: mlp(row, w_up, w_down, b_up, b_down, activation), x)


_ESTIMATE = "an estimate, beside the others of this table and onednn's"
_CPU = "scripts/measure_efficiency.py, AMD EPYC with AVX-512, 1 thread"
_CUDA = "an estimate for an H200: linear's share of the roofs, the others beside it"
_LARGE = "benchmarks/results/rows_h200.json: 3.5 ms for 4096 x 128256"
_ACTIVATED = "bias " + " ".join(f"act_{name}" for name in ACTIVATIONS)
# Op, function, features, and its efficiency on the CPU and on CUDA, each with its source.
Speed = tuple[float, float, float]
_TABLE: tuple[tuple[str, Callable[..., Any], str, Speed, str, Speed, str], ...] = (
    ("rms_norm", rms_norm, "no_weight", (0.1, 0.45, 11.0), _CPU, (0.1, 0.7, 9.0), _CUDA),
    ("add_rms_norm", add_rms_norm, "no_weight", (0.1, 0.6, 13.0), _CPU, (0.1, 0.5, 14.0), _CUDA),
    ("layer_norm", layer_norm, "no_weight bias", (0.15, 1.0, 3.5), _CPU, (0.1, 0.7, 8.0), _CUDA),
    (
        "add_layer_norm", add_layer_norm, "no_weight bias", (0.15, 1.0, 5.5), _ESTIMATE, (0.1, 0.5, 13.0),
        _CUDA,
    ),
    ("linear", linear, "bias", (0.8, 0.75, 2.5), _ESTIMATE, (0.7, 0.74, 8.0), _CUDA),
    ("mlp", mlp, _ACTIVATED, (0.75, 0.7, 14.0), _ESTIMATE, (0.6, 0.6, 25.0), _CUDA),
    ("embedding", embedding_reference, "padding_idx", (0.1, 1.0, 3.0), _CPU, (0.1, 0.6, 6.0), _CUDA),
    (
        "cross_entropy", cross_entropy_reference, "label_smoothing class_weights", (0.03, 0.15, 9.0), _CPU,
        (0.1, 0.07, 25.0), _LARGE,
    ),
    (
        "linear_cross_entropy", linear_cross_entropy, "bias label_smoothing", (0.6, 0.5, 16.0), _ESTIMATE,
        (0.5, 0.4, 35.0), _ESTIMATE,
    ),
)  # fmt: skip
# Ops whose rows get their bits from other rows' company on the CPU.
_BITS_OF_BATCH = frozenset({"linear", "linear_cross_entropy", "mlp"})
# Their operands may be of several dtypes.
_MIXED = frozenset({"add_layer_norm", "add_rms_norm"})
# Captured and replayed on one H200: benchmarks/results/graphs_h200.json.
_CAPTURED = frozenset(
    {"add_layer_norm", "add_rms_norm", "embedding", "layer_norm", "linear", "mlp", "rms_norm"}
)
# In half precision the CPU's layer norm computes x * rstd - mean * rstd in float32, so a row of equal numbers
# gives up to 6e-5 where the truth is 0. With one column every row is such a row.
_LIMITS = {"layer_norm": ("C >= 2",), "add_layer_norm": ("C >= 2",)}

_kernel = functools.partial(
    Kernel.of, source="torch.nn.functional; run on torch 2.13 CPU", tie_break_order=40, default=True
)
_append = functools.partial(
    _kernel,
    load=lambda: append_kv,
    measured=_ESTIMATE,
    source="torch.Tensor.index_copy_ and indexed assignment; run on torch 2.13 CPU",
    features="kv_float64 kv_float32 kv_bfloat16 kv_float16 kv_strided",
    layouts="NHD HND",
    gradient=False,
    batch_invariant=True,
)
_by_row = functools.partial(
    Kernel.of,
    measured=_CPU,
    source="by construction; run bitwise against other batches on torch 2.13 CPU",
    platforms="cpu",
    batch_invariant=True,
    tie_break_order=90,
)


def _of_op(
    op: str, function: Callable[..., Any], features: str, cpu: Speed, on_cpu: str, cuda: Speed, on_cuda: str
) -> tuple[Kernel, Kernel]:
    both = functools.partial(_kernel, load=lambda: function, features=features, mixed_dtypes=op in _MIXED)
    return (
        both(
            f"torch.{op}.native", efficiency=cpu, measured=on_cpu, platforms="cpu",
            batch_invariant=op not in _BITS_OF_BATCH, limits=_LIMITS.get(op, ()),
        ),
        both(
            f"torch.{op}.cuda", efficiency=cuda, measured=on_cuda, platforms="cuda rocm",
            graph_safe=op in _CAPTURED,
        ),
    )  # fmt: skip


KERNELS: tuple[Kernel, ...] = (
    _append("torch.append_kv.native", efficiency=(0.1, 0.3, 12.0), platforms="cpu"),
    _append("torch.append_kv.cuda", efficiency=(0.1, 0.3, 20.0), platforms="cuda rocm", graph_safe=True),
    *(kernel for row in _TABLE for kernel in _of_op(*row)),
    _by_row("torch.linear.by_row", lambda: linear_by_row, (0.15, 0.03, 15.0), features="bias"),
    _by_row("torch.mlp.by_row", lambda: mlp_by_row, (0.15, 0.03, 30.0), features=_ACTIVATED),
)
