"""Norms and rotations of rows on a CPU: C++ compiled on the user's machine.

torch takes several passes and launches for each; a step of decoding has few rows, where those are most of
the time. `rows.cpp` is the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.rope.rope import validate_rope_values
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel


def _library() -> Any:
    # Imported here: the module needs what only Unix has.
    from layerzero.backends.native import build

    return build.library("layerzero_rows")


def _rms_norm() -> Callable[..., Any]:
    native = _library().norm

    def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """One pass for the sum, one for the rows."""
        out = torch.empty_like(x)
        native(out, x, None, None, weight, eps)
        return out

    return rms_norm


def _add_rms_norm() -> Callable[..., Any]:
    native = _library().norm

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """The sum is written once and normed while it is in the cache."""
        out, total = torch.empty_like(x), torch.empty_like(x)
        native(out, x, residual, total, weight, eps)
        return out, total

    return add_rms_norm


def _rope() -> Callable[..., Any]:
    native = _library().rope

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


def _capability(dtypes: frozenset[str], features: frozenset[str], **more: Any) -> Capability:
    return Capability(
        source="by construction; run against float64 and bitwise in batches on an AMD EPYC with AVX2",
        platforms=frozenset({"cpu"}),
        dtypes=dtypes,
        features=features,
        gradient=False,
        autocast=False,
        batch_invariant=True,
        **more,
    )


_WEIGHTLESS = frozenset({"no_weight"})
_NORMED, _TURNED = frozenset({"float32", "bfloat16"}), frozenset({"float32"})
_SOURCE = "an estimate, a few microseconds a call where torch's parts take several times that, on an AMD EPYC"


def _kernel(op: str, load: Callable[[], Callable[..., Any]], capability: Capability) -> Kernel:
    return Kernel(
        id=f"native.{op}.rows", op=op, backend="native", capability=capability, load=load,
        efficiency=Efficiency(0.2, 0.5, 4.0, _SOURCE), tie_break_order=20, slow_import=True,
    )  # fmt: skip


KERNELS: tuple[Kernel, ...] = (
    _kernel("rms_norm", _rms_norm, _capability(_NORMED, _WEIGHTLESS, contiguous=True, mixed_dtypes=True)),
    _kernel(
        "add_rms_norm", _add_rms_norm, _capability(_NORMED, _WEIGHTLESS, contiguous=True, mixed_dtypes=True)
    ),
    _kernel("rope", _rope, _capability(_TURNED, frozenset({"partial_rotary"}), last_stride1=True)),
)
