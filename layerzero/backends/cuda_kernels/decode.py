"""Attention of one token a sequence over pages of codes of eight bits, in CUDA C++ (decode.cu)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.cuda_kernels.compiled import HALF, function, multiprocessors
from layerzero.ops.kv_formats import CODE_FEATURES, scale_steps
from layerzero.ops.paged.splitting import parts_of
from layerzero.spec.call_spec import CallSpec

_LOG2_E = 1.4426950408889634
_KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}
)
# Four blocks keep 16 warps' loads on their way, at the price of a few registers in memory.
_THREADS, _BLOCKS = 128, 4


def _compiled(
    device: torch.device, group: int, page: int, codes: torch.dtype, by_token: bool, dtype: torch.dtype,
    index: torch.dtype,
) -> tuple[Any, Any]:  # fmt: skip
    """What attends, and what joins its parts."""
    run = function(
        device, ("decode.cu",), "decode", HEADS=group, WIDTH=128, PAGE=page, KIND=_KINDS[codes],
        BY_TOKEN=int(by_token), HALF=HALF[dtype], INDEX="int" if index == torch.int32 else "long long",
        BLOCKS=_BLOCKS,
    )  # fmt: skip
    return run, function(device, ("join.cu",), "join_parts", HALF=HALF[dtype])


def unit(request: CallSpec) -> str:
    """What is compiled together: everything that the source has as a macro."""
    codes = next((name for name in sorted(request.features) if name in CODE_FEATURES), "")
    by_token, wide = "kv_scale_per_token" in request.features, "int64" in request.dtypes
    return f"{request.dtype} {codes} {by_token} {wide} {request.dim('G')} {request.dim('P')}"


def compile_for(request: CallSpec) -> None:
    """Compile what a request needs."""
    codes = next(dtype for name, dtype in CODE_FEATURES.items() if name in request.features)
    index = torch.int64 if "int64" in request.dtypes else torch.int32
    _compiled(
        torch.device(request.device), request.dim("G"), request.dim("P"), codes,
        "kv_scale_per_token" in request.features, getattr(torch, request.dtype), index,
    )  # fmt: skip


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor | None, is_causal: bool, scale: float | None, window: Any, softcap: Any,
    layout: str, return_lse: bool, k_scale: Tensor, v_scale: Tensor,
) -> Tensor:  # fmt: skip
    """One query token a sequence; of the optional arguments only scale, layout and scales are looked at."""
    sequences, heads, width = q.shape
    token, head = (1, 2) if layout == "NHD" else (2, 1)
    key_heads, page = k_cache.shape[head], k_cache.shape[token]
    parts = parts_of(sequences * key_heads, block_tables.shape[1] * page, multiprocessors(q.device))
    out = torch.empty((sequences, heads, width), dtype=q.dtype, device=q.device)
    if sequences == 0:
        return out
    mixed, best, weight = out, out, out
    if parts > 1:
        mixed = torch.empty((sequences, heads, parts, width), dtype=torch.float32, device=q.device)
        best, weight = torch.empty((2, sequences, heads, parts), dtype=torch.float32, device=q.device)
    tables = block_tables if block_tables.stride(-1) == 1 else block_tables.contiguous()
    seq_lens = seq_lens.to(tables.dtype).contiguous()
    if k_scale.stride() != v_scale.stride():
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
    run, join = _compiled(
        q.device, heads // key_heads, page, k_cache.dtype, k_scale.dim() > 1, q.dtype, tables.dtype
    )
    steps = [pool.stride(axis) for pool in (k_cache, v_cache) for axis in (0, token, head)]
    run(
        grid=(sequences, key_heads, parts), block=(_THREADS, 1, 1),
        args=[
            q, k_cache, v_cache, tables, seq_lens, mixed, best, weight, k_scale, v_scale,
            float((width**-0.5 if scale is None else scale) * _LOG2_E), q.stride(0), q.stride(1), *steps,
            tables.stride(0), *scale_steps(k_scale, token, head), parts,
        ],
    )  # fmt: skip
    if parts > 1:
        join(
            grid=(sequences * heads, 1, 1), block=(width, 1, 1),
            args=[mixed, best, weight, out, parts],
        )  # fmt: skip
    return out
