"""FlashAttention-2 (`flash-attn`): a package that is compiled where it is installed.

torch carries an older build of the same kernels (`torch.attention.sdpa_flash`), which needs no package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from layerzero.backends.flash_attn.shared import (
    FEATURES,
    SAME_HEAD_SIZES,
    DenseCall,
    PagedCall,
    RaggedCall,
    Result,
    both,
    flags,
    int32,
    kernel,
    takes,
)
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _attention() -> Callable[..., Any]:
    run = _interface().flash_attn_func

    @takes(DenseCall)
    def attention(call: DenseCall) -> Result:
        """Operands (B, S, H, D); causal is bottom-right by itself."""
        lse = call.return_lse
        out = run(call.q, call.k, call.v, call.dropout_p, return_attn_probs=lse, **flags(call))
        return both(out[0], out[1]) if lse else out

    return attention


def _ragged() -> Callable[..., Any]:
    run = _interface().flash_attn_varlen_func

    @takes(RaggedCall)
    def ragged_attention(call: RaggedCall) -> Result:
        """Sequences behind each other; the log-sum-exp comes heads first."""
        lse = call.return_lse
        out = run(call.q, call.k, call.v, *call.bounds, return_attn_probs=lse, **flags(call))
        return both(out[0], out[1].transpose(0, 1)) if lse else out

    return ragged_attention


def _paged() -> Callable[..., Any]:
    run = _interface().flash_attn_with_kvcache

    @takes(PagedCall)
    def paged_attention(call: PagedCall) -> Result:
        """One query a sequence over pages."""
        out = run(
            call.q.unsqueeze(1), call.k_cache, call.v_cache, cache_seqlens=int32(call.seq_lens),
            block_table=int32(call.block_tables), return_softmax_lse=call.return_lse, **flags(call),
        )  # fmt: skip
        if call.return_lse:
            return both(out[0].squeeze(1), out[1].squeeze(2))
        return out.squeeze(1)  # type: ignore[no-any-return]

    return paged_attention


def _capability(*, limits: tuple[Any, ...] = (), **more: Any) -> Capability:
    return Capability(
        # What was compiled and run: its forward for these head sizes in bfloat16. It has others too.
        source="flash-attn 2.8.3.post2, csrc/flash_attn/flash_api.cpp; run against float64 on an H200",
        platforms=frozenset({"cuda"}),
        sm_min=80,
        sm_max=121,
        dtypes=frozenset({"bfloat16"}),
        features=FEATURES | {"lse"},
        limits=("D in [64, 128]", SAME_HEAD_SIZES, *limits),
        last_stride1=True,
        alignment=16,
        gradient=False,
        **more,
    )


_AS_TORCH = "an estimate, taken over from torch's build of the same kernels (torch.attention.sdpa_flash)"
_SPEED = Efficiency(0.27, 0.6, 12.0, _AS_TORCH)
_make = functools.partial(kernel, "flash_attn_2", rank=39, distribution="flash-attn>=2.7")

KERNELS: tuple[Kernel, ...] = (
    _make("attention", "dense", _attention, _capability(layouts=frozenset({"BSHD"})), _SPEED),
    _make("ragged_attention", "varlen", _ragged, _capability(), _SPEED),
    _make(
        "paged_attention",
        "block_table",
        _paged,
        _capability(layouts=frozenset({"NHD"}), limits=("P % 256 == 0",)),
        _SPEED,
    ),
)
