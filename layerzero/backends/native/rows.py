"""Norms and rotations of rows on a CPU: C++ compiled on the user's machine.

torch takes several passes and launches for each; a step of decoding has few rows, where those are most of
the time. `rows.cpp` is the code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.native import compiled, load_module, refuse
from layerzero.spec.kernel import Kernel, loading


@loading(lambda: load_module("layerzero_rows").norm)
def _rms_norm(native: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """One pass for the sum, one for the rows."""
    out = torch.empty_like(x)
    native(out, x, None, None, weight, eps)
    return out


@loading(lambda: load_module("layerzero_rows").norm)
def _add_rms_norm(
    native: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum is written once and normed while it is in the cache."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    native(out, x, residual, total, weight, eps)
    return out, total


def _tables(cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [table.to(torch.float32).contiguous() for table in (cos, sin)]


@loading(lambda: load_module("layerzero_rows").rope)
def _rope(native: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Reads q and k in place, views of one projection too; writes dense heads."""
    q, k, positions, cos, sin, _, _ = args
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    if q.dim() == 3:
        flat = [*outs, q, k]
    else:
        flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (*outs, q, k)]
        positions = positions.reshape(-1)
    if not native(*flat, positions, *_tables(cos, sin)):
        refuse("rope", args)
    return outs


@loading(lambda: load_module("layerzero_rows").rope_append)
def _rope_append(native: Any, *args: Any) -> Tensor:
    """One pass a token: queries turned into the result, keys turned into their page, values copied."""
    q, k, v, positions, cos, sin, k_cache, v_cache, slot_mapping, _, layout = args
    out = q.new_empty(q.shape)
    pools = k_cache, v_cache, slot_mapping, layout == "HND"
    if not native(out, q, k, v, positions, *_tables(cos, sin), *pools):
        refuse("rope_append_kv", args)
    return out


_kernel = functools.partial(
    compiled,
    efficiency=(0.2, 0.5, 4.0),
    measured="an estimate, a few microseconds a call where torch's parts take several times that, on an AMD "
    "EPYC",
    source="by construction; run against float64 and bitwise in batches on an AMD EPYC with AVX2",
    autocast=False,
    batch_invariant=True,
)
_norm = functools.partial(
    _kernel, dtypes="float32 bfloat16", features="no_weight", contiguous=True, mixed_dtypes=True
)
_rotation = functools.partial(
    _kernel, dtypes="float32 bfloat16", features="partial_rotary", last_stride1=True
)

KERNELS: tuple[Kernel, ...] = (
    _norm("native.rms_norm.rows", _rms_norm),
    _norm("native.add_rms_norm.rows", _add_rms_norm),
    _rotation("native.rope.rows", _rope),
    _rotation("native.rope_append_kv.rows", _rope_append, layouts="NHD HND"),
)
