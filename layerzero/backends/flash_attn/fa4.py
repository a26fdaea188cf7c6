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
from dataclasses import replace
from typing import Any

from torch import Tensor

from layerzero.backends.flash_attn.shared import FEATURES, HALF, HEAD_SIZES, Result, Window, int32, kernel
from layerzero.kernel import AtLeast, AtMost, Capability, Efficiency, Kernel, MultipleOf
from layerzero.ops.mirrors import longest
from layerzero.ops.rehearsal import rehearse
from layerzero.ops.request import Request
from layerzero.reasons import Reason


@functools.cache
def _interface() -> Any:
    with warnings.catch_warnings():
        # The compiler package it brings uses what it has itself deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("flash_attn.cute")


def _bounds(window: Window) -> tuple[int | None, int | None]:
    left, right = window if window is not None else (-1, -1)
    return (None if left < 0 else left, None if right < 0 else right)


def _flags(is_causal: bool, scale: float | None, window: Window, softcap: float | None) -> dict[str, Any]:
    """Its keyword arguments; causal and a window together are a window without a future."""
    left, right = _bounds(window)
    if is_causal and left is not None:
        return {"softmax_scale": scale, "window_size": (left, 0), "softcap": softcap or 0.0}
    return {
        "softmax_scale": scale, "causal": is_causal, "softcap": softcap or 0.0,
        "window_size": (None, None) if is_causal else (left, right),
    }  # fmt: skip


def _attention() -> Callable[..., Any]:
    run = _interface().flash_attn_func

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
        dropout_p: float, window: Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
        return_lse: bool, *_: Any,
    ) -> Result:  # fmt: skip
        """Operands (B, S, H, D); causal is bottom-right by itself."""
        out, lse = run(q, k, v, return_lse=return_lse, **_flags(is_causal, scale, window, softcap))[:2]
        return (out, lse) if return_lse else out

    return attention


def _ragged() -> Callable[..., Any]:
    run = _interface().flash_attn_varlen_func

    def ragged_attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor, is_causal: bool,
        scale: float | None, window: Window, softcap: float | None, return_lse: bool,
    ) -> Result:  # fmt: skip
        """Sequences behind each other; the log-sum-exp comes heads first."""
        out, lse = run(
            q, k, v, cu_seqlens_q=int32(cu_seqlens), cu_seqlens_k=int32(cu_seqlens_k),
            max_seqlen_q=longest(cu_seqlens, q.shape[0]), max_seqlen_k=longest(cu_seqlens_k, k.shape[0]),
            return_lse=return_lse, **_flags(is_causal, scale, window, softcap),
        )[:2]  # fmt: skip
        return (out, lse.transpose(0, 1)) if return_lse else out

    return ragged_attention


def _paged() -> Callable[..., Any]:
    run = _interface().flash_attn_varlen_func

    def paged_attention(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, context_lens: Tensor,
        cu_seqlens: Tensor | None, is_causal: bool, scale: float | None, window: Window,
        softcap: float | None, layout: str, return_lse: bool,
    ) -> Result:  # fmt: skip
        """Block tables and lengths as they are: no plan, nothing read on the host."""
        flags = _flags(is_causal, scale, window, softcap)
        pages = {"page_table": int32(block_tables), "seqused_k": int32(context_lens)}
        if cu_seqlens is None:
            out, lse = run(q.unsqueeze(1), k_pages, v_pages, return_lse=return_lse, **pages, **flags)[:2]
            return (out.squeeze(1), lse.squeeze(2)) if return_lse else out.squeeze(1)
        out, lse = run(
            q, k_pages, v_pages, cu_seqlens_q=int32(cu_seqlens),
            max_seqlen_q=longest(cu_seqlens, q.shape[0]), return_lse=return_lse, **pages, **flags,
        )[:2]  # fmt: skip
        return (out, lse.transpose(0, 1)) if return_lse else out

    return paged_attention


_FEATURES = FEATURES | {"lse"}


def _capability(
    *, features: frozenset[str] = _FEATURES, limits: tuple[Any, ...] = (), **more: Any
) -> Capability:
    return Capability(
        source="flash-attn-4 4.0.0b36, flash_attn/cute/interface.py; run against float64 on an H200",
        platforms=frozenset({"cuda"}),
        # Other families have forward kernels too, with other limits; these are Hopper's.
        sm_min=90,
        sm_max=90,
        dtypes=HALF,
        features=features,
        limits=(AtLeast("D", 8), *HEAD_SIZES, *limits),
        last_stride1=True,
        alignment=16,
        gradient=False,
        graph_safe=True,
        **more,
    )


_MEASURED = "an estimate beside the eager and replayed prefills in benchmarks/results/regret_h200.json"
_FAST = Efficiency(0.67, 0.8, 75.6, _MEASURED)


def _make(
    op: str, variant: str, load: Callable[[], Callable[..., Any]], capability: Capability, speed: Efficiency
) -> Kernel:
    return replace(
        kernel("flash_attn_4", op, variant, load, capability, speed, 34, "flash-attn-4>=4.0.0b36"),
        unit=_compiled_for,
        build=lambda request: rehearse(load(), request),
    )


def _compiled_for(request: Request) -> str:
    """What its compiler tells apart: dtype, head size, heads a group, flags."""
    flags = sorted(request.features - {"scale", "gqa"})
    return " ".join([request.dtype, *(str(request.dim(name)) for name in ("D", "G")), *flags])


KERNELS: tuple[Kernel, ...] = (
    _make("attention", "dense", _attention, _capability(layouts=frozenset({"BSHD"})), _FAST),
    _make("ragged_attention", "varlen", _ragged, _capability(), _FAST),
    _make(
        "paged_attention",
        "page_table",
        _paged,
        _capability(
            features=_FEATURES | {"prefill"},
            layouts=frozenset({"NHD"}),
            # A page that holds whole tiles of keys is loaded with what stands behind the length, and a NaN
            # there reaches the output.
            limits=(AtMost("P", 64), MultipleOf("D", 16, Reason.HEAD_DIM_ALIGNMENT)),
        ),
        _FAST,
    ),
)
