"""A rank's part of a Llama, with the loop over it that a whole Llama has.

Rank 0 keeps the sequences. What it announces of a step is the tokens and where they begin; the pages of a
sequence go along once, and every rank keeps them, under the first of them, which no other sequence holds.
Rank 0 alone draws, and reads its tokens, as parts of the step: the next one sends them from the host.

Between two steps the devices would wait for the hosts. So while one step runs, every rank makes the places of
the one that follows if the same sequences continue by a token each; if others come, they are made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from models.llama import BLOCKING, Llama, SampleArgs, run_sync, sample_tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata, TokenRange
from layerzero.ops.host_copies import to_device_with_host_copy


@dataclass(frozen=True, slots=True)
class PreparedMetadata:
    """Places of a step that may come: a token each for sequences by their first pages, from `starts` on.

    `stream` is the CUDA stream that their transfers are on, None elsewhere.
    """

    firsts: list[int]
    starts: list[int]
    stream: Any
    metadata: AttentionMetadata


class RankLlama(Llama):
    """A part of a Llama on one rank: `step` and `next` are steps of the rank group, which rank 0 leads."""

    table_multiple = (
        1  # tables are so many pages wide, or twice, three times as many: a captured step has one width
    )

    def join(self, member: Any, name: str, *, alike: bool = True) -> None:
        """Make `logits` the step that all ranks run."""
        self._member = member
        width = -(-self.config.max_position_embeddings // self.cache.page_size)
        self._tables = np.zeros((self.cache.allocator.total, width), np.int32)
        self._known_pages: dict[int, list[int]] = {}  # pages that all ranks know, by the first of them
        self._sample_args: dict[int, SampleArgs] = {}
        self._prepared: PreparedMetadata | None = None
        self._batched_step = member.batched(self._step_on_rank, name=name, alike=alike)

    def logits(self, ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        """What every rank runs: the logits (B, V) of each sequence's last row among `ids` (T,)."""
        return run_sync(self.forward(BLOCKING, self._blocking, ids, metadata))

    async def step(self, ids: Tensor, span: TokenRange) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence."""
        pages = span.sequence.pages
        first = pages[0]
        new = [] if self._known_pages.get(first) is pages else pages
        host = ids if ids.is_cpu else await lz.to_host(ids)
        logits: Tensor = await self._batched_step(first, host, first, span.start, new)
        if new:
            self._known_pages[first] = new
        return logits

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows, on the host; rank 0 alone draws it."""
        first = span.sequence.pages[0]
        self._sample_args[first] = draw
        try:
            return await self.step(ids, span)
        finally:
            del self._sample_args[first]

    def _step_on_rank(
        self,
        ids: Tensor,
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        counts: list[int],
    ) -> Tensor | list[Tensor]:
        device = self.cache.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        ahead, self._prepared = self._prepared, None
        if any(pages):
            ahead = None
            for first, new in zip(firsts, pages, strict=True):
                self._tables[first, : len(new)] = new
        decoding = len(ids) == len(firsts)
        if decoding and ahead and (ahead.firsts, ahead.starts, ahead.stream) == (firsts, starts, stream):
            metadata = ahead.metadata
        else:
            metadata = self._metadata(firsts, starts, counts)
        logits = self.logits(ids if ids.device == device else to_device_with_host_copy(ids, device), metadata)
        draws = [] if self._member.rank else [self._sample_args.get(first) for first in firsts]
        drawn = self._sample_on_rank0(logits, draws)
        behind = [start + count for start, count in zip(starts, counts, strict=True)]
        if max(behind) < self.config.max_position_embeddings:
            self._prepared = PreparedMetadata(
                firsts, behind, stream, self._metadata(firsts, behind, [1] * len(behind))
            )
        return _answers(logits, draws, drawn())

    def _sample_on_rank0(
        self, logits: Tensor, draws: Several[SampleArgs | None]
    ) -> Callable[[], Tensor | None]:
        """What gives the tokens, on the host, of those rows that draw; it waits for the device."""
        rows = [row for row, draw in enumerate(draws) if draw is not None]
        if not rows:
            return lambda: None
        with self._member.using_model("draw"):  # which no other rank chooses for
            all_draw = len(rows) == len(logits)
            token_ids = sample_tokens(
                logits if all_draw else logits[rows], [draw for draw in draws if draw is not None]
            )
        if token_ids.is_cpu:
            return lambda: token_ids
        host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True).copy_(
            token_ids, non_blocking=True
        )
        event = torch.cuda.Event()
        event.record()

        def landed() -> Tensor:
            event.synchronize()
            return host

        return landed

    def _metadata(self, firsts: list[int], starts: list[int], counts: list[int]) -> AttentionMetadata:
        """The places of `counts` rows of each sequence, from `starts` on."""
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
            offsets = to_device_with_host_copy(
                torch.from_numpy(np.append(0, behind).astype(np.int32)), device
            )
            last = to_device_with_host_copy(torch.from_numpy(behind - 1), device)
        width = -(-int(ends.max()) // (size * self.table_multiple)) * self.table_multiple
        slots = self._tables[rows, positions // size] * size + positions % size
        host_values = to_device_with_host_copy(torch.from_numpy(np.stack((positions, slots))), device)
        return AttentionMetadata(
            positions=host_values[0],
            slot_mapping=host_values[1],
            block_tables=to_device_with_host_copy(torch.from_numpy(self._tables[owners, :width]), device),
            seq_lens=to_device_with_host_copy(torch.from_numpy(ends.astype(np.int32)), device),
            cu_seqlens_q=offsets,
            logits_indices=last,
        )


def _answers(
    logits: Tensor, draws: Several[SampleArgs | None], drawn: Tensor | None
) -> Tensor | list[Tensor]:
    """A token for who draws, and for anybody else the logits (1, V)."""
    if drawn is None or len(drawn) == len(draws):
        return logits if drawn is None else drawn
    rows, sampled = list(logits.split(1)), iter(drawn.split(1))
    return [row if draw is None else next(sampled) for row, draw in zip(rows, draws, strict=True)]
