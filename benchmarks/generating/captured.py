"""The model's step as a captured graph: what `lz.compile` makes of it, awaited through `lz.batched`.

Tokens are drawn from the graph's logits by an ordinary call: a draw may look at its rows, which no capture
allows.
A step's rows are tokens of sequences that decode, one each. Block tables have one width, so that one graph
serves every length up to it; rows of padding write places of their own that no sequence has.
"""

from __future__ import annotations

import torch
from llama import BLOCKING, Draw, Llama, drawn, finished
from paging import Chunk, Places, places
from torch import Tensor

import layerzero as lz


class Captured:
    """A model that answers `next` by a graph, for sequences of at most `limit` tokens."""

    def __init__(self, model: Llama, limit: int, rows: int) -> None:
        self.model, self.config, self.pages = model, model.config, model.pages
        size, device = model.pages.page_size, model.pages.device
        self.width, self.rows = -(-limit // size), rows
        self._spare = model.pages.sequence(rows)
        # What stands in the rows of padding: token 0 at position 0, each at a place of its own.
        self._zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        pages = torch.tensor(self._spare.pages, dtype=torch.int32).repeat_interleave(size)[:rows]
        self._slots = (pages.long() * size + torch.arange(rows) % size).to(device)
        self._tables = pages[:, None].repeat(1, self.width).to(device)
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        # One bucket for the crowd, one for who is alone: each capture costs seconds.
        self._graph = lz.compile(self._step, buckets=sorted({1, rows}))
        self._joined = lz.batched(self.nexts)

    async def next(self, ids: Tensor, chunk: Chunk, draw: Draw) -> Tensor:
        """The token (1,) that follows `ids` (1,) of one sequence."""
        token: Tensor = await self._joined(ids, chunk, draw)
        return token

    def nexts(self, ids: Tensor, chunks: list[Chunk], draws: list[Draw]) -> list[Tensor]:
        """`next` for all callers at once."""
        at = places(chunks)
        tables = torch.nn.functional.pad(at.tables, (0, self.width - at.tables.shape[1]))
        count = len(chunks)
        rows = ids, at.positions, at.slots, tables, at.lengths
        if 1 < count < self.rows:
            spare = self._zeros, self._zeros, self._slots, self._tables, self._ones
            rows = tuple(torch.cat((own, pad[count:])) for own, pad in zip(rows, spare, strict=True))
        logits: Tensor = self._graph(*rows)
        return drawn(logits[:count], draws)

    def close(self) -> None:
        """Give the page of the padding back."""
        self.pages.allocator.give_back(self._spare.pages)

    def _step(self, ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        at = Places(positions, slots, tables, lengths, None, slice(None))
        return finished(self.model.forward(BLOCKING, self.model._blocking, ids, at))
