"""The model as captured graphs, a whole step in one or a layer each: `lz.compile` inside `lz.batched`.

Where the rows of a step stand lies in a `Frame` that every graph reads: it is written once a step, not once
a layer, and its tables only for who joins or leaves. Block tables have one width, so that one graph serves
every length up to it; rows of padding write places of their own that no sequence has.
Tokens are drawn from a graph's logits by an ordinary call: a draw may look at its rows, which no capture
allows.
"""

from __future__ import annotations

from array import array

import torch
from models.llama import BLOCKING, Layer, Llama, SampleArgs, run_sync, sample_tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata, PagedCache, PagedSequence, TokenRange


class Frame:
    """Places of at most `rows` rows in memory that stays where it is: one token of a sequence each."""

    def __init__(self, cache: PagedCache, limit: int, rows: int) -> None:
        size, device = cache.page_size, cache.device
        self.cache, self.rows, self.width = cache, rows, -(-limit // size)
        self._spare = cache.sequence(rows)
        # What stands in the rows of padding: the first token of a sequence, each at a place of its own.
        own = torch.tensor(self._spare.pages, dtype=torch.int32).repeat_interleave(size)[:rows]
        slots = own * size + torch.arange(rows, dtype=torch.int32) % size
        self._padding = torch.stack([torch.zeros_like(slots), slots, torch.ones_like(slots)])
        self._near = own[:, None].repeat(1, self.width)
        # Numbers and tables lie behind each other, so that one transfer brings both; each on sixteen bytes.
        self._begin = 3 * rows + -3 * rows % 4
        first = torch.zeros(self._begin + self._near.numel(), dtype=torch.int32)
        first[: 3 * rows], first[self._begin :] = self._padding.flatten(), self._near.flatten()
        with torch.inference_mode(False):
            self._held = first.to(device, copy=True)
        self._numbers = self._held[: 3 * rows].view(3, rows)
        self._tables = self._held[self._begin :].view(rows, self.width)
        self._spans: list[TokenRange] = []
        self._sequences: list[PagedSequence] = []  # whose tables stand in the first rows

    def load(self, spans: list[TokenRange]) -> None:
        """Let `spans`, a token each, be what the rows are from now on."""
        if spans == self._spans:  # another layer of the same step
            return
        self._spans, count, rows = list(spans), len(spans), self.rows
        sequences, starts = [span.sequence for span in spans], [span.start for span in spans]
        size = self.cache.page_size
        slots = [s.pages[n // size] * size + n % size for s, n in zip(sequences, starts, strict=True)]
        own = array("i", [*starts, *slots, *(start + 1 for start in starts)])
        changed = sequences != self._sequences
        reach = self._held.numel() if changed else 3 * rows
        # A GPU fetches it out of pinned memory in its turn, straight into what the graphs read.
        host = torch.empty(reach, dtype=torch.int32, pin_memory=self._held.is_cuda)
        numbers = host[: 3 * rows].view(3, rows)
        numbers.copy_(self._padding)
        numbers[:, :count] = torch.frombuffer(own, dtype=torch.int32).view(3, count)
        if changed:
            self._sequences = sequences
            tables = host[self._begin :].view(rows, self.width)
            tables.copy_(self._near)
            near = sequences[0].block_tables.gather([sequence.row for sequence in sequences], self.width)
            tables[:count, : near.shape[1]] = near
        self._held[:reach].copy_(host, non_blocking=True)

    def places(self, rows: int) -> AttentionMetadata:
        """Where the first `rows` rows stand, whatever is loaded."""
        positions, slots, lengths = self._numbers[:, :rows]
        return AttentionMetadata(positions, slots, self._tables[:rows], lengths, None, slice(None))

    def close(self) -> None:
        """Give the pages of the padding back."""
        self._spare.close()


class Whole:
    """A model that answers `sample_next` by one graph a step, for sequences of at most `limit` tokens."""

    def __init__(self, model: Llama, limit: int, rows: int) -> None:
        self.model, self.config, self.cache = model, model.config, model.cache
        self.sequence = model.sequence
        self.frame = Frame(model.cache, limit, rows)
        # One bucket for the crowd, one for who is alone: each capture costs seconds.
        self._graph = lz.compile(self._step, buckets=sorted({1, rows}))
        self._joined = lz.batched(self.sample_next_batch)

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows `ids` (1,) of one sequence."""
        token: Tensor = await self._joined(ids, span, draw)
        return token

    def sample_next_batch(self, ids: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`sample_next` for all callers at once."""
        self.frame.load(spans)
        return sample_tokens(self._graph(ids), draws)

    def close(self) -> None:
        """Give the pages of the padding back."""
        self.frame.close()

    def _step(self, ids: Tensor) -> Tensor:
        at = self.frame.places(ids.shape[0])
        return run_sync(self.model.forward(BLOCKING, self.model._blocking, ids, at))


class Part:
    """One layer as a graph, from rows `x` (T, C) to rows; the first takes ids, the last one gives logits."""

    def __init__(self, model: Llama, index: int, frame: Frame) -> None:
        self.model, self.frame, self.index = model, frame, index
        self.layer: Layer = model.layers[index]
        self.norm = model.input_norm if index == 0 else model.layers[index - 1].next_norm
        self._graph = lz.compile(self._step, buckets=(frame.rows,))

    def run(self, x: Tensor, spans: list[TokenRange]) -> Tensor:
        """The layer for the rows of all callers at once."""
        self.frame.load(spans)
        out: Tensor = self._graph(x)
        return out

    def draw(self, x: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`run` of the last layer, and a token (1,) for each caller."""
        return sample_tokens(self.run(x, spans), draws)

    def _step(self, x: Tensor) -> Tensor:
        model, eps = self.model, self.model.config.rms_norm_eps
        if self.index == 0:
            x = lz.sync.embedding(x, model.embed_tokens)
        # Normed anew, so that one tensor goes from layer to layer and not two.
        normed = lz.sync.rms_norm(x, self.norm, eps=eps)
        at = self.frame.places(x.shape[0])
        normed, x = run_sync(self.layer.forward(BLOCKING, normed, x, at))
        if self.index < len(model.layers) - 1:
            return x
        logits: Tensor = lz.sync.linear(normed, model.lm_head)
        return logits


class Layered:
    """A model that answers `sample_next` by a graph a layer, each one await."""

    def __init__(self, model: Llama, limit: int, rows: int) -> None:
        self.model, self.config, self.cache = model, model.config, model.cache
        self.sequence = model.sequence
        self.frame = Frame(model.cache, limit, rows)
        self.parts = [Part(model, index, self.frame) for index in range(len(model.layers))]
        self._joined = [lz.batched(part.run) for part in self.parts[:-1]]
        self._last = lz.batched(self.parts[-1].draw)

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows `ids` (1,) of one sequence."""
        x = ids
        for layer in self._joined:
            x = await layer(x, span)
        token: Tensor = await self._last(x, span, draw)
        return token

    def sample_next_batch(self, ids: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`sample_next` for all callers at once, without an await."""
        x = ids
        for part in self.parts[:-1]:
            x = part.run(x, spans)
        return self.parts[-1].draw(x, spans, draws)

    def close(self) -> None:
        """Give the pages of the padding back."""
        self.frame.close()
