"""FlashAttention-2 (`flash-attn`): a package that is compiled where it is installed.

torch carries an older build of the same kernels (`torch.attention.sdpa_flash`), which needs no package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.flash_attn.shared import (
    FEATURES,
    SAME_HEAD_SIZES,
    Result,
    Window,
    both,
    flags,
    int32,
    kernel,
)
from layerzero.kernel import Capability, Efficiency, Kernel, MultipleOf, OneOf
from layerzero.ops.mirrors import longest


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _attention() -> Callable[..., Any]:
    run = _interface().flash_attn_func

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
        dropout_p: float, window: Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
        return_lse: bool, *_: Any,
    ) -> Result:  # fmt: skip
        """Operands (B, S, H, D); causal is bottom-right by itself."""
        out = run(
            q, k, v, dropout_p, return_attn_probs=return_lse, **flags(is_causal, scale, window, softcap)
        )
        return both(out[0], out[1]) if return_lse else out

    return attention


def _ragged() -> Callable[..., Any]:
    run = _interface().flash_attn_varlen_func

    def ragged_attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor, is_causal: bool,
        scale: float | None, window: Window, softcap: float | None, return_lse: bool,
    ) -> Result:  # fmt: skip
        """Sequences behind each other; the log-sum-exp comes heads first."""
        out = run(
            q, k, v, int32(cu_seqlens), int32(cu_seqlens_k), longest(cu_seqlens, q.shape[0]),
            longest(cu_seqlens_k, k.shape[0]), return_attn_probs=return_lse,
            **flags(is_causal, scale, window, softcap),
        )  # fmt: skip
        return both(out[0], out[1].transpose(0, 1)) if return_lse else out

    return ragged_attention


def _paged() -> Callable[..., Any]:
    run = _interface().flash_attn_with_kvcache

    def paged_attention(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, context_lens: Tensor,
        cu_seqlens: Tensor | None, is_causal: bool, scale: float | None, window: Window,
        softcap: float | None, layout: str, return_lse: bool,
    ) -> Result:  # fmt: skip
        """One query a sequence over pages."""
        out = run(
            q.unsqueeze(1), k_pages, v_pages, cache_seqlens=int32(context_lens),
            block_table=int32(block_tables), return_softmax_lse=return_lse,
            **flags(is_causal, scale, window, softcap),
        )  # fmt: skip
        if return_lse:
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
        limits=(OneOf("D", (64, 128)), SAME_HEAD_SIZES, *limits),
        last_stride1=True,
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
        _capability(layouts=frozenset({"NHD"}), limits=(MultipleOf("P", 256),)),
        _SPEED,
    ),
)
