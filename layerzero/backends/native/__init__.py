"""Attention over pages and ragged sequences, and appending to pages: C++ compiled on the user's machine.

`attention.cpp` and `append.h` are the kernels. Compiling takes up to a minute and is
done once, in the background or by warming up; until then, and wherever there is no compiler, the other
kernels serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import kv_formats, table
from layerzero.ops.attention.checks import window_bounds
from layerzero.ops.op import Args
from layerzero.spec.kernel import Kernel, loading


@functools.cache
def load_module(name: str = "layerzero_native") -> Any:
    """A module of this folder, compiled first where neither the wheel nor this user has it: up to a minute.

    Raises: BackendNotAvailableError: no compiler, a compile error, or a cache folder that others can write.
    """
    # Imported here: it needs what only Unix has.
    from layerzero.native import compiling

    return compiling.library(name).get()


@loading(lambda: load_module().paged)
def _paged(native: Any, *args: Any) -> Tensor | tuple[Tensor, Tensor]:
    """One walk over each sequence's pages; what it cannot trust it refuses before it reads."""
    q, k, v, tables, lens, cu, is_causal, scale, window, softcap, layout, return_lse, k_scale, v_scale = args
    out, lse = _results(q, v.shape[3], return_lse)
    window_left, right = window_bounds(is_causal, window)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    cap = 0.0 if softcap is None else softcap
    if not native(out, lse, q, k, v, tables, lens, cu, factor, window_left, right, cap, layout == "HND",
                  k_scale, v_scale):  # fmt: skip
        refuse("paged_attention", args)
    return out if lse is None else (out, lse)


@loading(lambda: load_module().ragged)
def _ragged(native: Any, *args: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The same walk over keys that follow each other."""
    q, k, v, cu, cu_k, is_causal, scale, window, softcap, return_lse, _, k_scale, v_scale = args
    out, lse = _results(q, v.shape[2], return_lse)
    window_left, right = window_bounds(is_causal, window)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    cap = 0.0 if softcap is None else softcap
    if not native(out, lse, q, k, v, cu, cu_k, factor, window_left, right, cap, k_scale, v_scale):
        refuse("ragged_attention", args)
    return out if lse is None else (out, lse)


@loading(lambda: load_module().latent)
def _latent(native: Any, *args: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Keys are put together from both pools; their first part is the values."""
    q, q_pe, ckv, kpe, tables, lens, cu, scale, is_causal, return_lse, ckv_scale, kpe_scale = args
    out, lse = _results(q, q.shape[2], return_lse)
    right = 0 if is_causal else -1
    if not native(out, lse, q, q_pe, ckv, kpe, tables, lens, cu, scale, right, ckv_scale, kpe_scale):
        refuse("mla_attention", args)
    return out if lse is None else (out, lse)


def _append() -> Callable[..., Any]:
    native, codes = load_module().append, load_module().append_codes

    def append_kv(*args: Any) -> Tensor:
        """One copy a token and pool, rounded to codes where it holds them, after a look at all slots."""
        k, v, k_cache, v_cache, _, layout, k_scale, v_scale = args
        slot_mapping: Tensor = args[4]
        if k_scale is None:
            if not native(k, v, k_cache, v_cache, slot_mapping, layout == "HND"):
                refuse("append_kv", args)
            return slot_mapping
        if not codes(k, v, k_cache, v_cache, slot_mapping, layout == "HND", k_scale, v_scale):
            refuse("append_kv", args)
        kv_formats.note_format(k_cache, k_scale)
        kv_formats.note_format(v_cache, v_scale)
        return slot_mapping

    return append_kv


def _results(q: Tensor, width: int, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    out = torch.empty((q.shape[0], q.shape[1], width), dtype=q.dtype, device=q.device)
    return out, torch.empty(out.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None


def refuse(op: str, args: Args) -> None:
    """Raise the error that names what does not fit."""
    guard = table.get(op).validate_values
    assert guard is not None
    guard(args)
    raise AssertionError("the kernel refused metadata that the op's guard accepts")


# What all kernels of this folder have in common.
compiled = functools.partial(Kernel.of, platforms="cpu", gradient=False, tie_break_order=20, slow_import=True)
_kernel = functools.partial(
    compiled,
    measured="estimate, ordered by benchmarks/paged.py on an AMD EPYC",
    source="by construction; run against float64 loops and bitwise in batches on an AMD EPYC with AVX-512",
    dtypes="float32 bfloat16 float16",
    last_stride1=True,
    batch_invariant=True,
)
_EFFICIENCY = (0.4, 0.7, 8.0)
_MIXED = "kv_float32 kv_bfloat16 kv_float16 prefill"
_CODES = "kv_float8_e4m3fn kv_float8_e5m2 kv_int8 kv_scale_per_tensor kv_scale_per_token"
_SCORES = "causal lse gqa scale scale_not_positive window softcap"
_WIDTHS = ("D <= 1024 else HEAD_DIM_TOO_LARGE", "Dv <= 1024 else HEAD_DIM_TOO_LARGE")

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "native.append_kv.cpu", _append, (0.1, 0.5, 1.0),
        source="by construction: whole rows are copied, or rounded one by one", layouts="NHD HND",
        features=f"{_CODES} kv_scale_per_head",
    ),
    _kernel(
        "native.paged_attention.cpu", _paged, _EFFICIENCY,
        features=f"{_MIXED} {_SCORES} {_CODES} kv_scale_per_head", layouts="NHD HND", limits=_WIDTHS,
    ),
    _kernel(
        "native.ragged_attention.cpu", _ragged, _EFFICIENCY,
        features=f"{_SCORES} {_CODES} kv_scale_per_head", limits=_WIDTHS,
    ),
    _kernel(
        "native.mla_attention.cpu", _latent, _EFFICIENCY,
        features=f"{_MIXED} {_CODES} causal lse scale_not_positive", limits=("C <= 1024", "R <= 1024"),
    ),
)  # fmt: skip
