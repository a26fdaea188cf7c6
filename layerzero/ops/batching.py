"""Batching rules: how calls of several callers become one launch and come apart again.

`Rows` serves every op that treats the rows of its first operand independently: norms, linear, MLP,
embedding, sampling. Rows of several callers stand behind each other in one tensor; when they already do,
because they are the pieces of one earlier batch, the base is used as it is and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero.native import HOT
from layerzero.ops.op import Args, Launch


def identity(value: Any) -> Hashable:
    """What makes an argument the same for two callers: tensors by memory, everything else by value."""
    if isinstance(value, Tensor):
        return (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
    same: Hashable = value
    return same


def rejoin(pieces: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `pieces` are consecutive row blocks of, as a view; None when they are not.

    Pieces are (rows_i, ...) of one dtype and, beyond their rows, one shape. Pieces that touch in memory
    and whose first and last share a storage lie in it altogether.
    """
    first = pieces[0]
    stride = first.stride()
    if not stride or stride[0] == 0:
        return None
    step = stride[0] * first.element_size()
    start = expected = first.data_ptr()
    # A single row is contiguous whatever its stride: only a stride that leads to the next row counts.
    dense = first.is_contiguous() and stride[0] == _product(first.shape[1:])
    turned = first.is_conj(), first.is_neg()
    for piece in pieces:
        if (piece.is_conj(), piece.is_neg()) != turned:
            return None
        # Dense pieces of one row shape have one stride; asking whether they are is half the price.
        if piece.data_ptr() != expected or not (piece.is_contiguous() if dense else piece.stride() == stride):
            return None
        expected += piece.size(0) * step
    if pieces[-1].untyped_storage()._cdata != first.untyped_storage()._cdata:
        return None
    return first.as_strided(((expected - start) // step, *first.shape[1:]), stride)


def cat(pieces: Sequence[Tensor]) -> Tensor:
    """`torch.cat` in front; under autocast that refuses pieces of the other half precision."""
    if not torch._C._is_any_autocast_enabled():
        return torch.cat(list(pieces))
    with torch.autocast(pieces[0].device.type, enabled=False):
        return torch.cat(list(pieces))


def join_rows(pieces: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor: the shared base where there is one, one gather otherwise."""
    if len(pieces) == 1:
        return pieces[0]
    joined: Tensor | None = NotImplemented
    if HOT.module is not None:
        joined = HOT.module.rejoin(pieces)
    if joined is NotImplemented:
        joined = rejoin(pieces)
    return joined if joined is not None else cat(pieces)


class Rule:
    """What tells callers apart: whatever a rule does not put together has to be the same for all of a batch.

    A rule names the operands that its `run` joins (`joined`), and what those need in common (`alike`). Every
    other tensor is in the group by its memory and every other value by itself, so that an argument which a
    rule does not know keeps callers apart.
    """

    __slots__ = ()

    @property
    def joined(self) -> Container[int]:
        """The positions of the operands that `run` puts together."""
        raise NotImplementedError

    def alike(self, args: Args) -> Hashable | None:
        """What the joined operands of two calls need in common; None where the call must run alone."""
        raise NotImplementedError

    def group(self, args: Args) -> Hashable | None:
        """`alike`, and the identity of everything that is not joined."""
        alike, joined = self.alike(args), self.joined
        if alike is None:
            return None
        return alike, *[identity(value) for position, value in enumerate(args) if position not in joined]

    def shared(self, args: Args) -> tuple[int, ...]:
        """Positions of the tensors that must be the same memory for two calls to join."""
        joined = self.joined
        return tuple(p for p, value in enumerate(args) if isinstance(value, Tensor) and p not in joined)


@dataclass(frozen=True, slots=True)
class Rows(Rule):
    """Calls over rows: `along` are the operands whose leading axes are rows, the rest must be the same.

    `tail` is how many trailing axes of those operands are not rows (1 for (..., C); 0 for ids (...)), one
    number for all or one for each; `out_tail` is the same for the outputs. `fits(args)` may refuse a call.
    """

    along: tuple[int, ...] = (0,)
    tail: int | tuple[int, ...] = 1
    out_tail: int | tuple[int, ...] = 1
    fits: Callable[[Args], bool] | None = None
    tails: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tail = (self.tail,) * len(self.along) if isinstance(self.tail, int) else self.tail
        object.__setattr__(self, "tails", dict(zip(self.along, tail, strict=True)))

    @property
    def rowwise(self) -> bool:
        """Rows do not touch each other."""
        return True

    @property
    def joined(self) -> Container[int]:
        """The operands whose leading axes are rows."""
        return self.tails

    def alike(self, args: Args) -> Hashable | None:
        """The dtype, device and row shape of what joins, None for an operand that is absent."""
        if self.fits is not None and not self.fits(args):
            return None
        rows = [(args[position], tail) for position, tail in self.tails.items()]
        return tuple(
            value if value is None else (value.dtype, value.device, value.shape[value.dim() - tail :])
            for value, tail in rows
        )

    def size(self, args: Args) -> tuple[int, int]:
        """Rows and bytes of the first operand."""
        first: Tensor = args[self.along[0]]
        tail = self.tails[self.along[0]]
        elements = first.numel()
        width = (
            1 if tail == 0 else first.shape[-1] if tail == 1 else _product(first.shape[first.dim() - tail :])
        )
        return elements // max(width, 1), elements * first.element_size()

    def run(self, calls: Sequence[Args], launch: Launch) -> list[Any]:
        """One launch over everybody's rows; each caller gets a view of the result."""
        if len(calls) == 1:
            return [launch(calls[0])]
        merged = list(calls[0])
        # A caller whose rows have one leading axis needs no reshape, before or after: its lead is None.
        leads: list[tuple[int, ...] | None] = []
        counts: list[int] = []
        for position, tail in self.tails.items():
            if calls[0][position] is None:
                continue
            gathered = NotImplemented if HOT.module is None else HOT.module.gather(calls, position, tail)
            if gathered is not NotImplemented:
                merged[position], rows = gathered
                if position == self.along[0]:
                    counts, leads = rows, _NO_LEADS
                continue
            pieces = []
            for args in calls:
                tensor: Tensor = args[position]
                cut = tensor.dim() - tail
                lead = None if cut == 1 else tensor.shape[:cut]
                piece = tensor if lead is None else tensor.reshape((_product(lead), *tensor.shape[cut:]))
                if position == self.along[0]:
                    leads.append(lead)
                    counts.append(piece.size(0))
                pieces.append(piece)
            merged[position] = join_rows(pieces)
        out = launch(tuple(merged))
        if not isinstance(out, tuple):
            tail = self.out_tail if isinstance(self.out_tail, int) else self.out_tail[0]
            return _split(out, tail, counts, leads)
        tails = (self.out_tail,) * len(out) if isinstance(self.out_tail, int) else self.out_tail
        split = [_split(part, tail, counts, leads) for part, tail in zip(out, tails, strict=True)]
        return list(zip(*split, strict=True))


# All callers' rows have one leading axis.
_NO_LEADS: list[tuple[int, ...] | None] = []


def _split(
    out: Tensor, tail: int, counts: Sequence[int], leads: Sequence[tuple[int, ...] | None]
) -> list[Tensor]:
    if leads is _NO_LEADS:
        pieces = NotImplemented if HOT.module is None else HOT.module.split(out, counts, False)
        return list(out.split_with_sizes(list(counts))) if pieces is NotImplemented else pieces
    trailing = out.shape[out.dim() - tail :]
    return [
        piece if lead is None else piece.view((*lead, *trailing))
        for piece, lead in zip(out.split_with_sizes(list(counts)), leads, strict=True)
    ]


def _product(values: Sequence[int]) -> int:
    product = 1
    for value in values:
        product *= value
    return product
