"""Ragged attention on CUDA out of torch alone: its FlashAttention 2 and its memory-efficient kernel.

Both take offsets, so sequences of any lengths are one launch. Both want the longest sequence as a number on
the host, to size their grid: where no host copy of the offsets says it, or a graph is captured that will see
other lengths, all rows bound it, which costs empty blocks and waits for nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from layerzero.ops.attention.adapters import Result, int32
from layerzero.ops.host_copies import max_seqlen
from layerzero.spec.kernel import Kernel

aten = torch.ops.aten
# The memory-efficient kernel's names for what a query may see.
_EVERYTHING, _BOTTOM_RIGHT = 0, 2


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, is_causal: bool,
    scale: float | None, window: tuple[int, int] | None, softcap: float | None, return_lse: bool,
) -> Result:  # fmt: skip
    """FlashAttention 2 as torch carries it; causal is bottom-right by itself."""
    window_left, right = window if window is not None else (-1, -1)
    windowed: dict[str, int] = {}
    if window_left >= 0 or right >= 0:
        windowed = {"window_size_left": window_left, "window_size_right": 0 if is_causal else right}
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, int32(cu_seqlens_q), int32(cu_seqlens_k), max_seqlen(cu_seqlens_q, q.shape[0]),
        max_seqlen(cu_seqlens_k, k.shape[0]), 0.0, is_causal and not windowed, False, scale=scale,
        **windowed,
    )  # fmt: skip
    if not return_lse:
        return out  # type: ignore[no-any-return]
    # It marks rows that see nothing with +inf.
    return out, lse.masked_fill(lse == torch.inf, -torch.inf).transpose(0, 1)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, is_causal: bool,
    scale: float | None, window: tuple[int, int] | None, softcap: float | None, return_lse: bool,
) -> Tensor:  # fmt: skip
    """The memory-efficient kernel that torch carries from xFormers, the only one of the two with float32."""
    out: Tensor = aten._efficient_attention_forward(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, int32(cu_seqlens_q), int32(cu_seqlens_k),
        max_seqlen(cu_seqlens_q, q.shape[0]), max_seqlen(cu_seqlens_k, k.shape[0]), 0.0,
        _BOTTOM_RIGHT if is_causal else _EVERYTHING, False, scale=scale,
    )[0]  # fmt: skip
    return out.squeeze(0)


_kernel = functools.partial(
    Kernel.of,
    platforms="cuda",
    sm_min=80,
    sm_max=121,
    last_stride1=True,
    alignment=16,
    gradient=False,  # the operator under the public function records none
    graph_safe=True,
)
_SOURCE = "aten::_{}_attention_forward; run against float64 on an H200, torch 2.11"
_DENSE = "its dense form on one H200, bf16, causal prefill 2048, 32/8 heads of 128: {} us"
_GRID = "B * Hq <= 65535 else CUDA_BLOCK_LIMIT_EXCEEDED"

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "torch.ragged_attention.flash", lambda: flash, (0.27, 0.6, 12.0), _DENSE.format(164),
        source=_SOURCE.format("flash"), dtypes="float16 bfloat16", features="causal scale gqa window lse",
        limits=(
            "D <= 256 else HEAD_DIM_TOO_LARGE", "D % 8 == 0 else HEAD_DIM_ALIGNMENT",
            "D == Dv else HEAD_DIMS_DIFFER", _GRID,
        ),
        tie_break_order=40, default=True,
    ),
    _kernel(
        "torch.ragged_attention.efficient", lambda: efficient, (0.16, 0.3, 12.0), _DENSE.format(269),
        source=_SOURCE.format("efficient"), dtypes="float16 bfloat16 float32", features="causal scale",
        limits=("D % 8 == 0 else HEAD_DIM_ALIGNMENT", "Dv % 8 == 0 else HEAD_DIM_ALIGNMENT", _GRID),
        tie_break_order=60,
    ),
)  # fmt: skip
