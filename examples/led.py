"""A rank's part of a Llama, with the loop over it that a whole Llama has.

Rank 0 keeps the sequences. What it announces of a step is the tokens and where they begin; the pages of a
sequence go along once, and every rank keeps them, under the first of them, which no other sequence holds.
Rank 0 alone draws, and reads its tokens, as parts of the step: the next one sends them from the host.

Between two steps the devices would wait for the hosts. So while one step runs, every rank makes the places of
the one that follows if the same sequences go on by a token each; if others come, they are made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llama import BLOCKING, Draw, Llama, finished, tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import Rows, Span
from layerzero.ops.host_copies import on_device


@dataclass(frozen=True, slots=True)
class Ahead:
    """Places of a step that may come: a token each for sequences by their first pages, from `starts` on.

    `stream` is the CUDA stream that their transfers are on, None elsewhere.
    """

    firsts: list[int]
    starts: list[int]
    stream: Any
    at: Rows


class Led(Llama):
    """A part of a Llama on one rank: `step` and `next` are steps of the gang, which rank 0 leads."""

    wide = 1  # tables are so many pages wide, or twice, three times as many: a captured step has one width

    def lead(self, member: Any, name: str, *, alike: bool = True) -> None:
        """Make `logits` the step that all ranks run."""
        self._member = member
        width = -(-self.config.positions // self.cache.page_size)
        self._tables = np.zeros((self.cache.allocator.total, width), np.int32)
        self._told: dict[int, list[int]] = {}  # pages that all ranks know, by the first of them
        self._draws: dict[int, Draw] = {}
        self._ahead: Ahead | None = None
        self._led = member.batched(self._stepped, name=name, alike=alike)

    def logits(self, ids: Tensor, at: Rows) -> Tensor:
        """What every rank runs: the logits (B, V) of each sequence's last row among `ids` (T,)."""
        return finished(self.forward(BLOCKING, self._blocking, ids, at))

    async def step(self, ids: Tensor, span: Span) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence."""
        pages = span.sequence.pages
        first = pages[0]
        new = [] if self._told.get(first) is pages else pages
        host = ids if ids.is_cpu else await lz.to_host(ids)
        found: Tensor = await self._led(first, host, first, span.start, new)
        if new:
            self._told[first] = new
        return found

    async def next(self, ids: Tensor, span: Span, draw: Draw) -> Tensor:
        """The token (1,) that follows, on the host; rank 0 alone draws it."""
        first = span.sequence.pages[0]
        self._draws[first] = draw
        try:
            return await self.step(ids, span)
        finally:
            del self._draws[first]

    def _stepped(
        self,
        ids: Tensor,
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        counts: list[int],
    ) -> Tensor | list[Tensor]:
        device = self.cache.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        ahead, self._ahead = self._ahead, None
        if any(pages):
            ahead = None
            for first, new in zip(firsts, pages, strict=True):
                self._tables[first, : len(new)] = new
        decoding = len(ids) == len(firsts)
        if decoding and ahead and (ahead.firsts, ahead.starts, ahead.stream) == (firsts, starts, stream):
            at = ahead.at
        else:
            at = self._places(firsts, starts, counts)
        logits = self.logits(ids if ids.device == device else on_device(ids, device), at)
        draws = [] if self._member.rank else [self._draws.get(first) for first in firsts]
        drawn = self._drawn(logits, draws)
        behind = [start + count for start, count in zip(starts, counts, strict=True)]
        if max(behind) < self.config.positions:
            self._ahead = Ahead(firsts, behind, stream, self._places(firsts, behind, [1] * len(behind)))
        return _answers(logits, draws, drawn())

    def _drawn(self, logits: Tensor, draws: Several[Draw | None]) -> Callable[[], Tensor | None]:
        """What gives the tokens, on the host, of those rows that draw; it waits for the device."""
        rows = [row for row, draw in enumerate(draws) if draw is not None]
        if not rows:
            return lambda: None
        with self._member.under("draw"):  # which no other rank chooses for
            all_draw = len(rows) == len(logits)
            found = tokens(logits if all_draw else logits[rows], [draw for draw in draws if draw is not None])
        if found.is_cpu:
            return lambda: found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def landed() -> Tensor:
            event.synchronize()
            return host

        return landed

    def _places(self, firsts: list[int], starts: list[int], counts: list[int]) -> Rows:
        """Where `counts` rows of each sequence stand, from `starts` on."""
        size, device = self.cache.page_size, self.cache.device
        owners, begun = np.array(firsts), np.array(starts)
        if max(counts) == 1:
            ends, rows, positions = begun + 1, owners, begun
            offsets: Tensor | None = None
            last: Tensor | slice = slice(None)
        else:
            added = np.array(counts)
            ends, behind = begun + added, added.cumsum()
            rows = np.repeat(owners, added)
            positions = np.repeat(begun - behind + added, added) + np.arange(behind[-1])
            offsets = on_device(torch.from_numpy(np.append(0, behind).astype(np.int32)), device)
            last = on_device(torch.from_numpy(behind - 1), device)
        width = -(-int(ends.max()) // (size * self.wide)) * self.wide
        slots = self._tables[rows, positions // size] * size + positions % size
        here = on_device(torch.from_numpy(np.stack((positions, slots))), device)
        return Rows(
            positions=here[0],
            slots=here[1],
            tables=on_device(torch.from_numpy(self._tables[owners, :width]), device),
            lengths=on_device(torch.from_numpy(ends.astype(np.int32)), device),
            offsets=offsets,
            last=last,
        )


def _answers(logits: Tensor, draws: Several[Draw | None], drawn: Tensor | None) -> Tensor | list[Tensor]:
    """A token for who draws, and for anybody else the logits (1, V)."""
    if drawn is None or len(drawn) == len(draws):
        return logits if drawn is None else drawn
    found, own = list(logits.split(1)), iter(drawn.split(1))
    return [row if draw is None else next(own) for row, draw in zip(found, draws, strict=True)]
