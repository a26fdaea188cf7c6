"""Batching rules: how calls of several callers become one launch and come apart again.

`RowBatching` serves every op that treats the rows of its first operand independently: norms, linear, MLP,
embedding, sampling. Rows of several callers are concatenated in one tensor; where they already are,
because they are the pieces of one earlier batch, the base is used as it is and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerzero.native import FAST_PATH
from layerzero.ops.op import Args, Batching, LaunchFunction


def as_view_of_base(pieces: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `pieces` are consecutive row blocks of, as a view; None when they are not.

    Pieces are (rows_i, ...) of one dtype and, beyond their rows, one shape. Pieces that touch in memory
    and whose first and last share a storage are all in it.
    """
    first = pieces[0]
    stride = first.stride()
    if not stride or stride[0] == 0:
        return None
    step = stride[0] * first.element_size()
    start = expected = first.data_ptr()
    # A single row is contiguous whatever its stride: only a stride that leads to the next row counts.
    dense = first.is_contiguous() and stride[0] == math.prod(first.shape[1:])
    lazy_flags = first.is_conj(), first.is_neg()
    for piece in pieces:
        if (piece.is_conj(), piece.is_neg()) != lazy_flags:
            return None
        # Dense pieces of one row shape have one stride; asking whether they are is half the price.
        if piece.data_ptr() != expected or not (piece.is_contiguous() if dense else piece.stride() == stride):
            return None
        expected += piece.size(0) * step
    if pieces[-1].untyped_storage()._cdata != first.untyped_storage()._cdata:
        return None
    return first.as_strided(((expected - start) // step, *first.shape[1:]), stride)


def concat_copy(pieces: Sequence[Tensor]) -> Tensor:
    """`torch.cat` in front; under autocast that refuses pieces of the other half precision."""
    if not torch._C._is_any_autocast_enabled():
        return torch.cat(list(pieces))
    with torch.autocast(pieces[0].device.type, enabled=False):
        return torch.cat(list(pieces))


def concat_rows(pieces: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor: the shared base where there is one, one gather otherwise."""
    if len(pieces) == 1:
        return pieces[0]
    combined: Tensor | None = NotImplemented
    if FAST_PATH.module is not None:
        combined = FAST_PATH.module.rejoin(pieces)
    if combined is NotImplemented:
        combined = as_view_of_base(pieces)
    return combined if combined is not None else concat_copy(pieces)


def split_outputs(out: Any, counts: Sequence[int]) -> list[Any]:
    """Each caller's rows of every output."""
    if isinstance(out, tuple):
        return list(zip(*(split_pieces(part, counts) for part in out), strict=True))
    return split_pieces(out, counts)


def split_pieces(out: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """So many rows each, behind one another: the memory of `out`, and apart from it to autograd.

    What one caller alone gets is `out`, with its tangent, or a level of a transform.
    """
    if len(counts) == 1:
        return [out]
    counts = list(counts)
    pieces = NotImplemented if FAST_PATH.module is None else FAST_PATH.module.split(out, counts, False)
    return [apart(view) for view in out.split_with_sizes(counts)] if pieces is NotImplemented else pieces


def apart(view: Tensor) -> Tensor:
    """A view as a tensor of its own over the same memory, unless it is of a graph or another class.

    One caller may change its rows in place: that refuses no view, and ends no neighbour's graph.
    """
    return view if view.requires_grad or view.__class__ is not Tensor else view.data


@dataclass(frozen=True, slots=True)
class TokenBatching(Batching):
    """What rules have in common whose first `tensors` arguments have rows of tokens, which are joined."""

    tensors: int

    def compatibility(self, args: Args) -> Hashable | None:
        """Dtype, device and row shape of each."""
        return tuple((t.dtype, t.device, t.shape[1:]) for t in args[: self.tensors])

    def batch_cost(self, args: Args) -> tuple[int, int]:
        """(tokens, bytes of their rows): what is copied."""
        rows: int = args[0].shape[0]
        return rows, sum(t.numel() * t.element_size() for t in args[: self.tensors])


@dataclass(frozen=True, slots=True)
class RowBatching(Batching):
    """Calls over rows: `row_operands` are those whose leading axes are rows, the rest must be the same.

    `trailing_axes` is how many trailing axes of those operands are not rows (1 for (..., C); 0 for ids
    (...)), one number for all or one for each; `output_trailing_axes` is the same for the outputs.
    `accepts(args)` may refuse a call. `weights` are operands in which the calls of one batch may differ: the
    rows of each weight are then joined by themselves.
    """

    row_operands: tuple[int, ...] = (0,)
    trailing_axes: int | tuple[int, ...] = 1
    output_trailing_axes: int | tuple[int, ...] = 1
    accepts: Callable[[Args], bool] | None = None
    weights: tuple[int, ...] = ()
    trailing_axes_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tail = (
            (self.trailing_axes,) * len(self.row_operands)
            if isinstance(self.trailing_axes, int)
            else self.trailing_axes
        )
        object.__setattr__(self, "trailing_axes_of", dict(zip(self.row_operands, tail, strict=True)))

    rowwise: ClassVar[bool] = True  # rows do not touch each other

    @property
    def concat_positions(self) -> Container[int]:
        """The operands whose leading axes are rows."""
        return self.trailing_axes_of

    def compatibility(self, args: Args) -> Hashable | None:
        """The dtype, device and row shape of what joins, None for an operand that is absent."""
        if self.accepts is not None and not self.accepts(args):
            return None
        rows = [(args[position], tail) for position, tail in self.trailing_axes_of.items()]
        return tuple(
            value if value is None else (value.dtype, value.device, value.shape[value.dim() - tail :])
            for value, tail in rows
        )

    def batch_cost(self, args: Args) -> tuple[int, int]:
        """Rows and bytes of the first operand."""
        first: Tensor = args[self.row_operands[0]]
        tail = self.trailing_axes_of[self.row_operands[0]]
        elements = first.numel()
        width = (
            1 if tail == 0 else first.shape[-1] if tail == 1 else math.prod(first.shape[first.dim() - tail :])
        )
        return elements // max(width, 1), elements * first.element_size()

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One launch over everybody's rows; each caller gets a view of the result."""
        if len(calls) == 1:
            return [launch(calls[0])]
        merged = list(calls[0])
        # A caller whose rows have one leading axis needs no reshape, before or after: its lead is None.
        leads: list[tuple[int, ...] | None] = []
        counts: list[int] = []
        for position, tail in self.trailing_axes_of.items():
            if calls[0][position] is None:
                continue
            gathered = (
                NotImplemented if FAST_PATH.module is None else FAST_PATH.module.gather(calls, position, tail)
            )
            if gathered is not NotImplemented:
                merged[position], rows = gathered
                if position == self.row_operands[0]:
                    counts, leads = rows, NO_LEADS
                continue
            pieces = []
            for args in calls:
                tensor: Tensor = args[position]
                cut = tensor.dim() - tail
                lead = None if cut == 1 else tensor.shape[:cut]
                piece = tensor if lead is None else tensor.reshape((math.prod(lead), *tensor.shape[cut:]))
                if position == self.row_operands[0]:
                    leads.append(lead)
                    counts.append(piece.size(0))
                pieces.append(piece)
            merged[position] = concat_rows(pieces)
        return self.split(launch(tuple(merged)), counts, leads)

    def split(self, out: Any, counts: Sequence[int], leads: Sequence[tuple[int, ...] | None]) -> list[Any]:
        """Each call's rows of every output, in its leading axes; `NO_LEADS` where all have one."""
        tails = self.output_trailing_axes
        if not isinstance(out, tuple):
            return _split_rows(out, tails if isinstance(tails, int) else tails[0], counts, leads)
        tails = (tails,) * len(out) if isinstance(tails, int) else tails
        split = [_split_rows(part, tail, counts, leads) for part, tail in zip(out, tails, strict=True)]
        return list(zip(*split, strict=True))


# All callers' rows have one leading axis.
NO_LEADS: list[tuple[int, ...] | None] = []


def _split_rows(
    out: Tensor, tail: int, counts: Sequence[int], leads: Sequence[tuple[int, ...] | None]
) -> list[Tensor]:
    pieces = split_pieces(out, counts)
    if leads is NO_LEADS:
        return pieces
    trailing = out.shape[out.dim() - tail :]
    return [
        piece if lead is None else apart(piece.view((*lead, *trailing)))
        for piece, lead in zip(pieces, leads, strict=True)
    ]
