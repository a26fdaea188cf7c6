"""A rank's part of a Llama, with the loop over it that a whole Llama has.

Rank 0 keeps the sequences. What it announces of a step is the tokens and where they begin; the pages of a
sequence go along once, and every rank keeps them, under the first of them, which no other sequence holds.
Rank 0 alone draws, as a part of the step, and reads its tokens behind it: the next step sends them from the
host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Several
from typing import Any

import torch
from llama import BLOCKING, Draw, Llama, finished, tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import PagedSequence, Rows, Span
from layerzero.ops.mirrors import on_device


class Led(Llama):
    """A part of a Llama on one rank: `step` and `next` are steps of the gang, which rank 0 leads."""

    wide = 1  # tables are so many pages wide, or twice, three times as many: a captured step has one width

    def lead(self, member: Any, name: str, *, alike: bool = True) -> None:
        """Make `logits` the step that all ranks run."""
        self._member = member
        widest = -(-self.config.positions // self.cache.page_size)
        self._tables = torch.zeros(self.cache.allocator.total, widest, dtype=torch.int32)
        self._told: dict[int, PagedSequence] = {}  # whose pages all ranks know, by the first of them
        self._draws: dict[int, Draw] = {}
        self._numbers = itertools.count()
        self._led = member.batched(self._stepped, name=name, alike=alike)

    def logits(self, ids: Tensor, at: Rows) -> Tensor:
        """What every rank runs: the logits (B, V) of each sequence's last row among `ids` (T,)."""
        return finished(self.forward(BLOCKING, self._blocking, ids, at))

    async def step(self, ids: Tensor, span: Span) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence."""
        return await self._announced(next(self._numbers), ids, span)

    async def next(self, ids: Tensor, span: Span, draw: Draw) -> Tensor:
        """The token (1,) that follows, on the host; rank 0 alone draws it."""
        number = next(self._numbers)
        self._draws[number] = draw
        try:
            return await lz.to_host(await self._announced(number, ids, span))
        finally:
            del self._draws[number]

    async def _announced(self, number: int, ids: Tensor, span: Span) -> Tensor:
        own = span.sequence
        host = ids if ids.device.type == "cpu" else await lz.to_host(ids)
        pages = [] if self._told.get(own.pages[0]) is own else own.pages
        found: Tensor = await self._led(number, host, number, span.start, own.pages[0], pages)
        self._told[own.pages[0]] = own
        return found

    def _stepped(
        self,
        ids: Tensor,
        numbers: list[int],
        starts: list[int],
        firsts: list[int],
        pages: list[list[int]],
        counts: list[int],
    ) -> list[Tensor]:
        for first, new in zip(firsts, pages, strict=True):
            if new:
                self._tables[first, : len(new)] = torch.tensor(new, dtype=torch.int32)
        size = self.cache.page_size
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        width = -(-longest // (size * self.wide)) * self.wide
        at = self._places(starts, self._tables[torch.tensor(firsts), :width], counts)
        device = self.cache.device
        logits = self.logits(ids if ids.device == device else on_device(ids, device), at)
        return self._answers(logits, [self._draws.get(number) for number in numbers])

    def _answers(self, logits: Tensor, draws: Several[Draw | None]) -> list[Tensor]:
        """On rank 0 a token for who draws, and for anybody else the logits (1, V)."""
        found = list(logits.split(1))
        own = [draw for draw in draws if draw is not None]
        if not own:
            return found
        rows = [row for row, draw in enumerate(draws) if draw is not None]
        with self._member.under("draw"):  # which no other rank chooses for
            drawn = tokens(logits if len(rows) == len(found) else logits[rows], own)
        for row, token in zip(rows, drawn.split(1), strict=True):
            found[row] = token
        return found

    def _places(self, starts: Several[int], tables: Tensor, counts: Several[int]) -> Rows:
        """Where `counts` rows of each sequence stand, from `starts` on; `tables` (B, M) are on the host."""
        size, device = self.cache.page_size, self.cache.device
        added = torch.tensor(counts)
        ends = added.cumsum(0)
        rows = torch.repeat_interleave(added)
        positions = torch.arange(len(rows)) + (torch.tensor(starts) - ends + added)[rows]
        slots = tables[rows, positions // size] * size + positions % size
        offsets = torch.cat([ends.new_zeros(1), ends]).int() if max(counts) > 1 else None
        positions, slots = on_device(torch.stack([positions, slots]), device)
        return Rows(
            positions=positions,
            slots=slots,
            tables=on_device(tables, device),
            lengths=on_device((torch.tensor(starts) + added).int(), device),
            offsets=None if offsets is None else on_device(offsets, device),
            last=slice(None) if offsets is None else on_device(ends - 1, device),
        )
