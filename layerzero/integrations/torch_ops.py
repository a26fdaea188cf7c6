"""Ops as operators of torch's own library, for programs that `torch.compile` or `torch.export` sees whole.

Importing this module registers `torch.ops.layerzero.embedding_lookup`. The kernel is chosen when the operator
runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero import sync


@torch.library.custom_op("layerzero::embedding_lookup", mutates_args=())
def embedding_lookup(weight: Tensor, indices: Tensor, padding_idx: int | None = None) -> Tensor:
    """The row of `weight` (V, C) for each of `indices` (...), int32 or int64: (..., C) in weight's dtype.

    The row `padding_idx` gets no gradient; negative counts from the end.
    Raises: ValueError, TypeError: as `layerzero.sync.embedding`.
    """
    with torch.no_grad():
        rows: Tensor = sync.embedding(indices, weight, padding_idx=padding_idx)
    return rows


@embedding_lookup.register_fake
def _(weight: Tensor, indices: Tensor, padding_idx: int | None = None) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int | None], output: Tensor) -> None:
    weight, indices, padding_idx = inputs
    ctx.save_for_backward(indices)
    ctx.vocabulary_size = weight.shape[0]
    ctx.padding_idx = -1 if padding_idx is None else padding_idx % weight.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = ctx.saved_tensors
    into: Tensor = torch.ops.aten.embedding_dense_backward(
        grad, indices, ctx.vocabulary_size, ctx.padding_idx, False
    )
    return into, None, None


embedding_lookup.register_autograd(_backward, setup_context=_remember)
