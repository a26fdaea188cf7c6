"""Batching rules: how calls of several callers become one launch and come apart again.

`Rows` serves every op that treats the rows of its first operand independently: norms, linear, MLP,
embedding, sampling. Rows of several callers stand behind each other in one tensor; when they already do,
because they are the pieces of one earlier batch, the base is used as it is and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.op import Args, Launch


def identity(value: Any) -> Hashable:
    """What makes an argument the same for two callers: tensors by memory, everything else by value."""
    if isinstance(value, Tensor):
        return (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
    return value


def rejoin(pieces: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `pieces` are consecutive row blocks of, as a view; None when they are not.

    Each piece is (rows_i, ...) and dense beyond its rows. Pieces that touch in memory and whose first and
    last share a storage lie in it altogether.
    """
    first = pieces[0]
    shape, stride = first.shape[1:], first.stride()
    if not stride or stride[0] == 0:
        return None
    step = stride[0] * first.element_size()
    expected = first.data_ptr()
    rows = 0
    for piece in pieces:
        if piece.data_ptr() != expected or piece.stride() != stride or piece.shape[1:] != shape:
            return None
        count = piece.shape[0]
        rows += count
        expected += count * step
    if pieces[-1].untyped_storage()._cdata != first.untyped_storage()._cdata:
        return None
    return first.as_strided((rows, *shape), stride)


def join_rows(pieces: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor: the shared base where there is one, one gather otherwise."""
    if len(pieces) == 1:
        return pieces[0]
    joined = rejoin(pieces)
    return joined if joined is not None else torch.cat(list(pieces))


@dataclass(frozen=True, slots=True)
class Rows:
    """Calls over rows: `along` are the operands whose leading axes are rows, the rest must be the same.

    `tail` is how many trailing axes of those operands are not rows (1 for (..., C); 0 for ids (...)).
    `out_tail` is the same for the outputs. `fits(args)` may refuse a call (None group).
    """

    along: tuple[int, ...] = (0,)
    tail: int = 1
    out_tail: int = 1
    fits: Callable[[Args], bool] | None = None

    def group(self, args: Args) -> Hashable | None:
        if self.fits is not None and not self.fits(args):
            return None
        parts: list[Hashable] = []
        for position, value in enumerate(args):
            if position in self.along:
                if value is None:
                    parts.append(None)
                    continue
                parts.append((value.dtype, value.device, value.shape[value.dim() - self.tail :]))
            else:
                parts.append(identity(value))
        return tuple(parts)

    def size(self, args: Args) -> tuple[int, int]:
        first: Tensor = args[self.along[0]]
        width = 1
        for extent in first.shape[first.dim() - self.tail :]:
            width *= extent
        return first.numel() // max(width, 1), first.numel() * first.element_size()

    def run(self, calls: Sequence[Args], launch: Launch) -> list[Any]:
        if len(calls) == 1:
            return [launch(calls[0])]
        merged = list(calls[0])
        leads: list[tuple[int, ...]] = []
        counts: list[int] = []
        for position in self.along:
            if calls[0][position] is None:
                continue
            pieces = []
            for args in calls:
                tensor: Tensor = args[position]
                cut = tensor.dim() - self.tail
                if position == self.along[0]:
                    lead = tensor.shape[:cut]
                    leads.append(lead)
                    counts.append(tensor.shape[0] if cut == 1 else _product(lead))
                pieces.append(tensor if cut == 1 else tensor.reshape(-1, *tensor.shape[cut:]))
            merged[position] = join_rows(pieces)
        out = launch(tuple(merged))
        if isinstance(out, tuple):
            split = [self._split(part, counts, leads) for part in out]
            return list(zip(*split, strict=True))
        return self._split(out, counts, leads)

    def _split(self, out: Tensor, counts: list[int], leads: list[tuple[int, ...]]) -> list[Any]:
        pieces = out.split_with_sizes(counts)
        tail = out.shape[out.dim() - self.out_tail :] if self.out_tail else ()
        return [
            piece if len(lead) == 1 else piece.view(*lead, *tail)
            for piece, lead in zip(pieces, leads, strict=True)
        ]


def _product(values: Sequence[int]) -> int:
    product = 1
    for value in values:
        product *= value
    return product
