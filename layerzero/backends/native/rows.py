"""Norms and rotations of rows on a CPU: C++ compiled on the user's machine.

torch takes several passes and launches for each; a step of decoding has few rows, where those are most of
the time. `rows.cpp` is the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.native import load_module
from layerzero.ops.rope.rope import validate_rope_values
from layerzero.spec.kernel import Kernel


def _rms_norm() -> Callable[..., Any]:
    native = load_module("layerzero_rows").norm

    def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """One pass for the sum, one for the rows."""
        out = torch.empty_like(x)
        native(out, x, None, None, weight, eps)
        return out

    return rms_norm


def _add_rms_norm() -> Callable[..., Any]:
    native = load_module("layerzero_rows").norm

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """The sum is written once and normed while it is in the cache."""
        out, total = torch.empty_like(x), torch.empty_like(x)
        native(out, x, residual, total, weight, eps)
        return out, total

    return add_rms_norm


def _rope() -> Callable[..., Any]:
    native = load_module("layerzero_rows").rope

    def rope(*args: Any) -> tuple[Tensor, Tensor]:
        """Reads q and k in place, views of one projection too; writes dense heads."""
        q, k, positions, cos, sin, _, _ = args
        outs = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
        if q.dim() == 3:
            flat = [*outs, q, k]
        else:
            flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (*outs, q, k)]
            positions = positions.reshape(-1)
        tables = [table.to(torch.float32).contiguous() for table in (cos, sin)]
        if not native(*flat, positions, *tables):
            validate_rope_values(args)
            raise AssertionError("the kernel refused positions that the op's guard accepts")
        return outs

    return rope


_kernel = functools.partial(
    Kernel.of,
    efficiency=(0.2, 0.5, 4.0),
    measured="an estimate, a few microseconds a call where torch's parts take several times that, on an AMD "
    "EPYC",
    source="by construction; run against float64 and bitwise in batches on an AMD EPYC with AVX2",
    platforms="cpu",
    gradient=False,
    autocast=False,
    batch_invariant=True,
    tie_break_order=20,
    slow_import=True,
)
_norm = functools.partial(
    _kernel, dtypes="float32 bfloat16", features="no_weight", contiguous=True, mixed_dtypes=True
)

KERNELS: tuple[Kernel, ...] = (
    _norm("native.rms_norm.rows", _rms_norm),
    _norm("native.add_rms_norm.rows", _add_rms_norm),
    _kernel("native.rope.rows", _rope, dtypes="float32", features="partial_rotary", last_stride1=True),
)
