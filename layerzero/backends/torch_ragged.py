"""Ragged attention on the CPU out of torch's own parts: sequences of like length padded together.

Sequences are taken by length, those whose length rounds up to one size share a padded batch and one SDPA
launch. Rows are gathered once and put back once; one launch a size replaces one a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.attention.adapters import takes
from layerzero.ops.attention.arguments import RaggedArgs
from layerzero.spec.kernel import Kernel

# Lengths are rounded up to a multiple of this; a larger step means fewer launches and more padding.
STEP = 8


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


KERNELS: tuple[Kernel, ...] = (
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
)
