"""FlashAttention-3 (`flash-attn-3`): Hopper's own, built from source or from PyTorch's package index."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from layerzero.backends.flash_attn.shared import FEATURES, THIRD, both, flags, hopper
from layerzero.ops.attention.adapters import Result, bounds, int32
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.ops.host_copies import max_seqlen
from layerzero.spec.kernel import Kernel, loading


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn_interface")


@loading(lambda: _interface().flash_attn_func, AttentionArgs)
def _attention(run: Any, call: AttentionArgs) -> Result:
    """Operands (B, S, H, D); causal is bottom-right by itself."""
    return run(call.q, call.k, call.v, **flags(call))  # type: ignore[no-any-return]


@loading(lambda: _interface().flash_attn_varlen_func, RaggedArgs)
def _ragged(run: Any, call: RaggedArgs) -> Result:
    """Sequences behind each other."""
    return run(call.q, call.k, call.v, *bounds(call), **flags(call))  # type: ignore[no-any-return]


@loading(lambda: _interface().flash_attn_with_kvcache, PagedArgs)
def _paged(run: Any, call: PagedArgs) -> Result:
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


_kernel = functools.partial(
    hopper,
    **THIRD,
    source="hopper/flash_attn_interface.py as flash-attn 2.8.3.post2 ships it; not executed here",
    features=FEATURES,
    cuda_min="12.3",
    tie_break_order=37,
    distributions=("flash-attn-3>=3.0.0b1",),
)

KERNELS: tuple[Kernel, ...] = (
    _kernel("flash_attn_3.attention.dense", _attention, layouts="BSHD"),
    _kernel("flash_attn_3.ragged_attention.varlen", _ragged),
    _kernel(
        "flash_attn_3.paged_attention.page_table", _paged, features=f"{FEATURES} prefill lse", layouts="NHD"
    ),
)
