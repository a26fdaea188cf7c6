"""Ragged attention out of torch alone: on CUDA its two kernels that take offsets, on the CPU padded batches.

Both of CUDA's want the longest sequence as a number on the host, to size their grid: where no host copy of
the offsets says it, or a graph is captured that will see other lengths, all rows bound it, which costs empty
blocks and waits for nothing. On the CPU, sequences whose length rounds up to one size share a padded batch
and one SDPA launch. Rows are gathered once and put back once; one launch a size replaces one a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.attention.adapters import Result, bounds, takes
from layerzero.ops.attention.arguments import RaggedArgs
from layerzero.spec.kernel import Kernel

aten = torch.ops.aten
# The memory-efficient kernel's names for what a query may see.
_EVERYTHING, _BOTTOM_RIGHT = 0, 2

# Lengths are rounded up to a multiple of this; a larger step means fewer launches and more padding.
STEP = 8


@takes(RaggedArgs)
def flash(call: RaggedArgs) -> Result:
    """FlashAttention 2 as torch carries it; causal is bottom-right by itself."""
    left, right = call.window if call.window is not None else (-1, -1)
    windowed: dict[str, int] = {}
    if left >= 0 or right >= 0:
        windowed = {"window_size_left": left, "window_size_right": 0 if call.is_causal else right}
    out, lse, *_ = aten._flash_attention_forward(
        *call[:3], *bounds(call), 0.0, call.is_causal and not windowed, False, scale=call.scale, **windowed
    )
    if not call.return_lse:
        return out  # type: ignore[no-any-return]
    # It marks rows that see nothing with +inf.
    return out, lse.masked_fill(lse == torch.inf, -torch.inf).transpose(0, 1)


@takes(RaggedArgs)
def efficient(call: RaggedArgs) -> Tensor:
    """The memory-efficient kernel that torch carries from xFormers, the only one of the two with float32."""
    out: Tensor = aten._efficient_attention_forward(
        *(tensor.unsqueeze(0) for tensor in call[:3]), None, *bounds(call), 0.0,
        _BOTTOM_RIGHT if call.is_causal else _EVERYTHING, False, scale=call.scale,
    )[0]  # fmt: skip
    return out.squeeze(0)


@takes(RaggedArgs)
def padded_attention(call: RaggedArgs) -> Tensor:
    """Attention of every sequence to itself, one SDPA launch for each padded length."""
    starts = call.cu_seqlens_q.tolist()
    starts_k = starts if call.cu_seqlens_k is call.cu_seqlens_q else call.cu_seqlens_k.tolist()
    out = call.q.new_empty(call.q.shape[0], call.q.shape[1], call.v.shape[2])
    for members in _by_length(starts, starts_k):
        _attend(call, [starts[b] for b in members], [starts_k[b] for b in members],
                [starts[b + 1] - starts[b] for b in members],
                [starts_k[b + 1] - starts_k[b] for b in members], out)  # fmt: skip
    return out


def _by_length(starts: Sequence[int], starts_k: Sequence[int]) -> list[list[int]]:
    """Sequences that have queries, grouped by their rounded lengths."""
    groups: dict[tuple[int, int], list[int]] = {}
    for b in range(len(starts) - 1):
        length, length_k = starts[b + 1] - starts[b], starts_k[b + 1] - starts_k[b]
        if length:
            groups.setdefault((-(-length // STEP), -(-length_k // STEP)), []).append(b)
    return list(groups.values())


def _attend(
    call: RaggedArgs, starts: list[int], starts_k: list[int], lengths: list[int], lengths_k: list[int],
    out: Tensor,
) -> None:  # fmt: skip
    q, k, v = call[:3]
    size, size_k = max(lengths), max(lengths_k)
    if size_k == 0:
        for start, length in zip(starts, lengths, strict=True):
            out[start : start + length] = 0
        return
    rows, real = _rows(starts, lengths, size)
    rows_k, real_k = (
        (rows, real) if starts_k == starts and lengths_k == lengths else _rows(starts_k, lengths_k, size_k)
    )
    many = len(starts)
    parts = [
        tensor.index_select(0, index).view(many, width, *tensor.shape[1:]).transpose(1, 2)
        for tensor, index, width in ((q, rows, size), (k, rows_k, size_k), (v, rows_k, size_k))
    ]
    mask = _mask(lengths, lengths_k, size, size_k, real_k, call.is_causal)
    mixed = functional.scaled_dot_product_attention(
        parts[0], parts[1], parts[2], attn_mask=mask, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    flat = mixed.transpose(1, 2).reshape(many * size, *out.shape[1:])
    if min(lengths) == size:
        out.index_copy_(0, rows, flat)
    else:
        real_rows = real.view(-1).nonzero().squeeze(1)
        out.index_copy_(0, rows.index_select(0, real_rows), flat.index_select(0, real_rows))


def _rows(starts: list[int], lengths: list[int], size: int) -> tuple[Tensor, Tensor]:
    """The row of every padded position, padding repeating a sequence's first row; and which are real."""
    first = torch.tensor(starts, device="cpu").unsqueeze(1)
    position = torch.arange(size, device="cpu").unsqueeze(0)
    real = position < torch.tensor(lengths, device="cpu").unsqueeze(1)
    rows = torch.where(real, first + position, first.clamp(max=max(starts)))
    return rows.view(-1), real


def _mask(
    lengths: list[int], lengths_k: list[int], size: int, size_k: int, real_k: Tensor, is_causal: bool
) -> Tensor | None:
    """Which keys each query sees, (B, 1, 1 or Sq, Sk) bool; None where it is all of them."""
    if not is_causal:
        return None if min(lengths_k) == size_k else real_k[:, None, None, :]
    # Bottom-right: the last query of a sequence sees its last key.
    shift = torch.tensor(lengths_k, device="cpu") - torch.tensor(lengths, device="cpu")
    reach = torch.arange(size, device="cpu")[None, :, None] + shift[:, None, None]
    seen = torch.arange(size_k, device="cpu")[None, None, :] <= reach
    return (seen & real_k[:, None, :])[:, None]


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
    Kernel.of(
        "torch.ragged_attention.padded",
        lambda: padded_attention,
        (0.4, 0.3, 150.0),
        "an estimate, from batches of short sequences on an AMD EPYC with AVX-512",
        source="torch.nn.functional.scaled_dot_product_attention on the CPU, sequences padded by length",
        platforms="cpu",
        dtypes="float32 bfloat16",
        features="causal gqa scale scale_not_positive",
        limits=("D <= 512 else HEAD_DIM_TOO_LARGE",),
        gradient=False,
        autocast=False,  # the products' dtype would not be the rows'
        tie_break_order=30,
        default=True,
    ),
)  # fmt: skip
