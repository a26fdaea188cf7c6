"""FlashAttention-3 (`flash-attn-3`): Hopper's own, built from source or from PyTorch's package index."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.flash_attn.shared import (
    FEATURES,
    HALF,
    HEAD_SIZES,
    Result,
    Window,
    both,
    flags,
    int32,
    kernel,
)
from layerzero.kernel import Capability, Efficiency, Kernel
from layerzero.ops.mirrors import longest


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn_interface")


def _attention() -> Callable[..., Any]:
    run = _interface().flash_attn_func

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
        dropout_p: float, window: Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
        *_: Any,
    ) -> Tensor:  # fmt: skip
        """Operands (B, S, H, D); causal is bottom-right by itself."""
        return run(q, k, v, **flags(is_causal, scale, window, softcap))  # type: ignore[no-any-return]

    return attention


def _ragged() -> Callable[..., Any]:
    run = _interface().flash_attn_varlen_func

    def ragged_attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor, is_causal: bool,
        scale: float | None, window: Window, softcap: float | None, return_lse: bool,
    ) -> Tensor:  # fmt: skip
        """Sequences behind each other."""
        return run(  # type: ignore[no-any-return]
            q, k, v, int32(cu_seqlens), int32(cu_seqlens_k), longest(cu_seqlens, q.shape[0]),
            longest(cu_seqlens_k, k.shape[0]), **flags(is_causal, scale, window, softcap),
        )  # fmt: skip

    return ragged_attention


def _paged() -> Callable[..., Any]:
    run = _interface().flash_attn_with_kvcache

    def paged_attention(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, context_lens: Tensor,
        cu_seqlens: Tensor | None, is_causal: bool, scale: float | None, window: Window,
        softcap: float | None, layout: str, return_lse: bool,
    ) -> Result:  # fmt: skip
        """Queries of any number a sequence over pages of any size."""
        several = cu_seqlens is not None
        ragged = {} if cu_seqlens is None else {
            "cu_seqlens_q": int32(cu_seqlens), "max_seqlen_q": longest(cu_seqlens, q.shape[0])
        }  # fmt: skip
        out = run(
            q if several else q.unsqueeze(1), k_pages, v_pages, cache_seqlens=int32(context_lens),
            page_table=int32(block_tables), return_softmax_lse=return_lse, **ragged,
            **flags(is_causal, scale, window, softcap),
        )  # fmt: skip
        if not return_lse:
            return out if several else out.squeeze(1)  # type: ignore[no-any-return]
        if several:
            return both(out[0], out[1].transpose(0, 1))
        return both(out[0].squeeze(1), out[1].squeeze(2))

    return paged_attention


def _capability(features: frozenset[str] = FEATURES, **more: Any) -> Capability:
    return Capability(
        source="hopper/flash_attn_interface.py as flash-attn 2.8.3.post2 ships it; not executed here",
        platforms=frozenset({"cuda"}),
        sm_min=90,
        sm_max=90,
        cuda_min="12.3",
        dtypes=HALF,
        features=features,
        limits=HEAD_SIZES,
        last_stride1=True,
        gradient=False,
        **more,
    )


_GUESS = Efficiency(0.6, 0.8, 20.0, "an estimate, from FlashInfer's FA3 template")
_make = functools.partial(kernel, "flash_attn_3", rank=37, distribution="flash-attn-3>=3.0.0b1")

KERNELS: tuple[Kernel, ...] = (
    _make("attention", "dense", _attention, _capability(layouts=frozenset({"BSHD"})), _GUESS),
    _make("ragged_attention", "varlen", _ragged, _capability(), _GUESS),
    _make(
        "paged_attention",
        "page_table",
        _paged,
        _capability(FEATURES | {"prefill", "lse"}, layouts=frozenset({"NHD"})),
        _GUESS,
    ),
)
