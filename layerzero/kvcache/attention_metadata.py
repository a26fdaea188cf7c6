"""Where the rows of a forward over pages stand, made for a crowd of sequences at once."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from layerzero.kvcache.block_tables import PagedSequence, Span, Tables
from layerzero.ops.host_copies import on_device, remember


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows (T,) of B sequences stand: what a forward needs beside the rows themselves.

    positions (T,) int64 in their sequences and slots (T,) int64 in the pool, as `append_kv` takes them.
    tables (B, M) and lengths (B,) with these rows counted, int32, as `paged_attention` takes them. offsets
    (B + 1,) int32 of each sequence's rows, or None where each has one. last picks each sequence's last row.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    offsets: Tensor | None
    last: Tensor | slice


class RowMaker:
    """Makes `Rows`; what the step before had already is used again.

    The layers of one step ask for the same spans, and a crowd that stays keeps its tables: they are made anew
    where a sequence joins, leaves or gets another page, and where the longest one needs a wider table.
    """

    __slots__ = ("_device", "_last", "_near", "_size", "_tables")

    def __init__(self, tables: Tables, page_size: int, device: torch.device) -> None:
        self._tables, self._size, self._device = tables, page_size, device
        self._last: tuple[list[Span], Hashable, Rows] | None = None
        self._near: tuple[list[PagedSequence], Hashable, Tensor] | None = None

    def rows(self, spans: Sequence[Span]) -> Rows:
        """Where the tokens of `spans` stand, one span behind the other."""
        spans, here = list(spans), self._stream()
        last = self._last
        if last is not None and last[0] == spans and last[1] == here:
            return last[2]
        with torch.inference_mode(False):
            made = self._made(spans)
        self._last = (spans, here, made)
        return made

    def _stream(self) -> Hashable:
        """The current CUDA stream: another one would not wait for what was sent on it."""
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None

    def _made(self, spans: list[Span]) -> Rows:
        sequences = [span.sequence for span in spans]
        counts = [span.count for span in spans]
        offsets: Tensor | None = None
        last: Tensor | slice = slice(None)
        if max(counts) == 1:
            size, positions = self._size, [span.start for span in spans]
            slots = [s.pages[n // size] * size + n % size for s, n in zip(sequences, positions, strict=True)]
            lengths = [start + 1 for start in positions]
        else:
            positions = [place for span in spans for place in range(span.start, span.end)]
            slots, lengths = self.slots(spans), [span.end for span in spans]
            ends = list(accumulate(counts))
            offsets = on_device(torch.tensor([0, *ends], dtype=torch.int32), self._device)
            last = on_device(torch.tensor(ends) - 1, self._device)
        where, slot, length = self._sent(positions, slots, lengths)
        tables = self.tables(sequences, -(-max(lengths) // self._size))
        return Rows(where, slot, tables, length, offsets, last)

    def slots(self, spans: Sequence[Span]) -> list[int]:
        """The places in the pool of all tokens, page by page."""
        size = self._size
        slots: list[int] = []
        for span in spans:
            at, end, pages = span.start, span.end, span.sequence.pages
            while at < end:
                until = min(end, at - at % size + size)
                first = pages[at // size] * size + at % size
                slots += range(first, first + until - at)
                at = until
        return slots

    def _sent(self, positions: list[int], slots: list[int], lengths: list[int]) -> tuple[Tensor, ...]:
        """All three on the device, in one transfer; each begins where sixteen bytes do."""
        gap = [0] * (len(slots) % 2)
        numbers = array("q", [*positions, *gap, *slots, *gap])
        numbers.frombytes(array("i", lengths + [0] * (len(lengths) % 2)).tobytes())
        count, behind = len(slots), len(slots) + len(gap)
        own = (
            torch.frombuffer(numbers, dtype=torch.int64, count=count),
            torch.frombuffer(numbers, dtype=torch.int64, count=count, offset=8 * behind),
            torch.frombuffer(numbers, dtype=torch.int32, count=len(lengths), offset=16 * behind),
        )
        if self._device.type == "cpu":
            return own
        there = on_device(torch.frombuffer(numbers, dtype=torch.int64), self._device)
        ends = there[2 * behind :].view(torch.int32)[: len(lengths)]
        return there[:count], there[behind : behind + count], remember(ends, own[2])

    def tables(self, sequences: list[PagedSequence], width: int) -> Tensor:
        """The page tables (B, width) of `sequences` on the device."""
        here = self._stream(), width, self._tables.version
        near = self._near
        if near is not None and near[0] == sequences and near[1] == here:
            return near[2]
        if any(sequence.tables is not self._tables for sequence in sequences):
            raise ValueError("spans needs those of this cache's sequences, got another cache's")
        picked = self._tables.pick([sequence.row for sequence in sequences], width)
        made = picked if self._device.type == "cpu" else on_device(picked, self._device)
        self._near = (sequences, here, made)
        return made
