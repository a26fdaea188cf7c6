"""FlashAttention-3 (`flash-attn-3`): Hopper's own, built from source or from PyTorch's package index."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from layerzero.backends.flash_attn.shared import (
    FEATURES,
    THIRD,
    DenseCall,
    PagedCall,
    RaggedCall,
    Result,
    both,
    flags,
    hopper,
    int32,
    kernel,
    takes,
)
from layerzero.ops.host_copies import max_seqlen
from layerzero.spec.kernel import Kernel


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn_interface")


def _attention() -> Callable[..., Any]:
    run = _interface().flash_attn_func

    @takes(DenseCall)
    def attention(call: DenseCall) -> Result:
        """Operands (B, S, H, D); causal is bottom-right by itself."""
        return run(call.q, call.k, call.v, **flags(call))  # type: ignore[no-any-return]

    return attention


def _ragged() -> Callable[..., Any]:
    run = _interface().flash_attn_varlen_func

    @takes(RaggedCall)
    def ragged_attention(call: RaggedCall) -> Result:
        """Sequences behind each other."""
        return run(call.q, call.k, call.v, *call.bounds, **flags(call))  # type: ignore[no-any-return]

    return ragged_attention


def _paged() -> Callable[..., Any]:
    run = _interface().flash_attn_with_kvcache

    @takes(PagedCall)
    def paged_attention(call: PagedCall) -> Result:
        """Queries of any number a sequence over pages of any size."""
        several, ragged = call.cu_seqlens_q is not None, dict[str, Any]()
        if call.cu_seqlens_q is not None:
            ragged["cu_seqlens_q"] = int32(call.cu_seqlens_q)
            ragged["max_seqlen_q"] = max_seqlen(call.cu_seqlens_q, call.q.shape[0])
        out = run(
            call.q if several else call.q.unsqueeze(1), call.k_cache, call.v_cache,
            cache_seqlens=int32(call.seq_lens), page_table=int32(call.block_tables),
            return_softmax_lse=call.return_lse, **ragged, **flags(call),
        )  # fmt: skip
        if not call.return_lse:
            return out if several else out.squeeze(1)  # type: ignore[no-any-return]
        if several:
            return both(out[0], out[1].transpose(0, 1))
        return both(out[0].squeeze(1), out[1].squeeze(2))

    return paged_attention


_capability = functools.partial(
    hopper,
    "hopper/flash_attn_interface.py as flash-attn 2.8.3.post2 ships it; not executed here",
    cuda_min="12.3",
    alignment=16,
)
_make = functools.partial(kernel, "flash_attn_3", rank=37, distribution="flash-attn-3>=3.0.0b1")

KERNELS: tuple[Kernel, ...] = (
    _make("attention", "dense", _attention, _capability(layouts=frozenset({"BSHD"})), THIRD),
    _make("ragged_attention", "varlen", _ragged, _capability(), THIRD),
    _make(
        "paged_attention",
        "page_table",
        _paged,
        _capability(features=FEATURES | {"prefill", "lse"}, layouts=frozenset({"NHD"})),
        THIRD,
    ),
)
