"""FlashAttention-4 (`flash-attn-4`): kernels written in Python and compiled for the device at first use.

A new head size, dtype or flag compiles for seconds. A call costs its host much more than other
libraries' do, which rules it out for small shapes run eagerly and not under graph replay. Its module's own
version is always 0.0.0.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from layerzero.backends.flash_attn.shared import FEATURES, HEAD_SIZES, hopper
from layerzero.ops.attention.adapters import Result, bounds, int32
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.ops.host_copies import max_seqlen
from layerzero.ops.rehearsal import dummy_run
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import SDPA_SWITCHED_OFF
from layerzero.spec.kernel import Kernel, Tiling, loading


@functools.cache
def _interface() -> Any:
    with warnings.catch_warnings():
        # The compiler package it brings uses what it has itself deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("flash_attn.cute")


def _flags(call: AttentionArgs | RaggedArgs | PagedArgs) -> dict[str, Any]:
    """Its keyword arguments; causal and a window together are a window without a future."""
    window_left, right = (None if side < 0 else side for side in call.window or (-1, -1))
    named: dict[str, Any] = {"softmax_scale": call.scale, "softcap": call.softcap or 0.0}
    if call.is_causal and window_left is not None:
        return named | {"window_size": (window_left, 0)}
    return named | {
        "causal": call.is_causal,
        "window_size": (None, None) if call.is_causal else (window_left, right),
    }


@loading(lambda: _interface().flash_attn_func, AttentionArgs)
def _attention(run: Any, call: AttentionArgs) -> Result:
    """Operands (B, S, H, D); causal is bottom-right by itself."""
    out, lse = run(call.q, call.k, call.v, return_lse=call.return_lse, **_flags(call))[:2]
    return (out, lse) if call.return_lse else out


@loading(lambda: _interface().flash_attn_varlen_func, RaggedArgs)
def _ragged(run: Any, call: RaggedArgs) -> Result:
    """Sequences behind each other; the log-sum-exp comes heads first."""
    starts, starts_k, max_seqlen_q, most_k = bounds(call)
    out, lse = run(
        call.q, call.k, call.v, cu_seqlens_q=starts, cu_seqlens_k=starts_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=most_k, return_lse=call.return_lse, **_flags(call),
    )[:2]  # fmt: skip
    return (out, lse.transpose(0, 1)) if call.return_lse else out


@loading(lambda: _interface().flash_attn_varlen_func, PagedArgs)
def _paged(run: Any, call: PagedArgs) -> Result:
    """Block tables and lengths as they are: no plan, nothing read on the host."""
    pages = {"page_table": int32(call.block_tables), "seqused_k": int32(call.seq_lens)}
    named = {**pages, **_flags(call), "return_lse": call.return_lse}
    if call.cu_seqlens_q is None:
        out, lse = run(call.q.unsqueeze(1), call.k_cache, call.v_cache, **named)[:2]
        return (out.squeeze(1), lse.squeeze(2)) if call.return_lse else out.squeeze(1)
    out, lse = run(
        call.q, call.k_cache, call.v_cache, cu_seqlens_q=int32(call.cu_seqlens_q),
        max_seqlen_q=max_seqlen(call.cu_seqlens_q, call.q.shape[0]), **named,
    )[:2]  # fmt: skip
    return (out, lse.transpose(0, 1)) if call.return_lse else out


_TILES = Tiling(
    rows=((96, 192), (256, 128)),
    packed=True,
    splits=False,
    source="flash-attn-4 4.0.0b36, flash_attn/cute/interface.py: _tile_size_fwd_sm90, pack_gqa's default",
)
_LIMITS = (*HEAD_SIZES, "D >= 8")


def _compiled_for(request: CallSpec) -> str:
    """What its compiler tells apart: dtype, head size, heads a group, flags."""
    flags = sorted(request.features - {"scale", "gqa", *SDPA_SWITCHED_OFF})
    return " ".join([request.dtype, *(str(request.dim(name)) for name in ("D", "G")), *flags])


def _kernel(name: str, load: Callable[[], Callable[..., Any]], **own: Any) -> Kernel:
    fields: dict[str, Any] = {
        "features": f"{FEATURES} lse", "limits": _LIMITS, "graph_safe": True, "tie_break_order": 34,
        "source": "flash-attn-4 4.0.0b36, flash_attn/cute/interface.py; run against float64 on an H200",
        "measured": "an estimate beside the eager and replayed prefills in "
        "benchmarks/results/regret_h200.json",
        "distributions": ("flash-attn-4>=4.0.0b36",), "compile_key": _compiled_for,
        "compile": lambda request: dummy_run(load(), request),
    }  # fmt: skip
    return hopper(f"flash_attn_4.{name}", load, (0.67, 0.8, 75.6), **fields | own)


KERNELS: tuple[Kernel, ...] = (
    _kernel("attention.dense", _attention, layouts="BSHD", tiling=_TILES),
    _kernel("ragged_attention.varlen", _ragged),
    _kernel(
        "paged_attention.page_table",
        _paged,
        features=f"{FEATURES} lse prefill",
        layouts="NHD",
        # A page that holds whole tiles of keys is loaded with what follows the length, and a NaN
        # there reaches the output.
        limits=(*_LIMITS, "P <= 64", "D % 16 == 0 else HEAD_DIM_ALIGNMENT"),
    ),
)
