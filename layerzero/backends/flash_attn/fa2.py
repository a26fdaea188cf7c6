"""FlashAttention-2 (`flash-attn`): a package that is compiled where it is installed.

torch carries an older build of the same kernels (`torch.attention.sdpa_flash`), which needs no package.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from layerzero.backends.flash_attn.shared import FEATURES, SAME_HEAD_SIZES, ampere, both, flags
from layerzero.ops.attention.adapters import Result, bounds, int32
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.spec.kernel import Kernel, loading


@functools.cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


@loading(lambda: _interface().flash_attn_func, AttentionArgs)
def _attention(run: Any, call: AttentionArgs) -> Result:
    """Operands (B, S, H, D); causal is bottom-right by itself."""
    lse = call.return_lse
    out = run(call.q, call.k, call.v, call.dropout_p, return_attn_probs=lse, **flags(call))
    return both(out[0], out[1]) if lse else out


@loading(lambda: _interface().flash_attn_varlen_func, RaggedArgs)
def _ragged(run: Any, call: RaggedArgs) -> Result:
    """Sequences behind each other; the log-sum-exp comes heads first."""
    lse = call.return_lse
    out = run(call.q, call.k, call.v, *bounds(call), return_attn_probs=lse, **flags(call))
    return both(out[0], out[1].transpose(0, 1)) if lse else out


@loading(lambda: _interface().flash_attn_with_kvcache, PagedArgs)
def _paged(run: Any, call: PagedArgs) -> Result:
    """One query a sequence over pages."""
    out = run(
        call.q.unsqueeze(1), call.k_cache, call.v_cache, cache_seqlens=int32(call.seq_lens),
        block_table=int32(call.block_tables), return_softmax_lse=call.return_lse, **flags(call),
    )  # fmt: skip
    if call.return_lse:
        return both(out[0].squeeze(1), out[1].squeeze(2))
    return out.squeeze(1)  # type: ignore[no-any-return]


# What was compiled and run: its forward for these head sizes in bfloat16. It has others too.
_kernel = functools.partial(
    ampere,
    efficiency=(0.27, 0.6, 12.0),
    measured="an estimate, taken over from torch's build of the same kernels (torch.attention.sdpa_flash)",
    source="flash-attn 2.8.3.post2, csrc/flash_attn/flash_api.cpp; run against float64 on an H200",
    dtypes="bfloat16",
    features=f"{FEATURES} lse",
    limits=("D in [64, 128]", SAME_HEAD_SIZES),
    tie_break_order=39,
    distributions=("flash-attn>=2.7",),
)

KERNELS: tuple[Kernel, ...] = (
    _kernel("flash_attn_2.attention.dense", _attention, layouts="BSHD"),
    _kernel("flash_attn_2.ragged_attention.varlen", _ragged),
    _kernel(
        "flash_attn_2.paged_attention.block_table",
        _paged,
        layouts="NHD",
        limits=("D in [64, 128]", SAME_HEAD_SIZES, "P % 256 == 0"),
    ),
)
