"""The pages that keys and values lie in, and where the rows of a forward stand in them.

A sequence takes all the pages it may ever need when it opens and gives them back when it closes, so that
no request runs out of memory half way; a pool that cannot hold it says so at once. The allocator is the
library's. Its `PagedCache` takes pages one by one as a sequence grows, and makes tables anew for each step;
here a sequence's table is made once, and a step only stacks them.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch
from torch import Tensor

from layerzero.kvcache import PageAllocator
from layerzero.ops.mirrors import on_device


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows (T,) of B sequences stand: what a layer needs beside the rows themselves.

    positions (T,) in their sequences, slots (T,) in the pool; tables (B, M), lengths (B,) with these rows
    counted, offsets (B + 1,) of each sequence's rows, or None where each has one; last picks each sequence's
    last row.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    offsets: Tensor | None
    last: Tensor | slice


class Chunk:
    """`count` tokens that a sequence adds from position `start` on."""

    last = slice(-1, None)

    def __init__(self, sequence: Sequence, start: int, count: int) -> None:
        self.sequence, self.start, self.count = sequence, start, count

    @property
    def end(self) -> int:
        """The sequence's length with this chunk."""
        return self.start + self.count

    @property
    def positions(self) -> range:
        """The tokens' places in their sequence."""
        return range(self.start, self.end)

    @cached_property
    def places(self) -> Places:
        """Where these tokens stand when nobody else's stand beside them."""
        return _places([self])

    def slots(self) -> list[int]:
        """The chunk's places in the pool."""
        pages, size = self.sequence.pages, self.sequence.pool.page_size
        return [pages[at // size] * size + at % size for at in self.positions]


class Sequence:
    """One request's pages; a context manager that gives them back."""

    def __init__(self, pool: Pages, pages: list[int], limit: int) -> None:
        self.pool, self.pages, self.limit = pool, pages, limit
        self.length = 0
        self.table = torch.zeros(pool.width, dtype=torch.int32)
        self.table[: len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def extend(self, count: int) -> Chunk:
        """Places for the next `count` tokens.

        Raises: ValueError: the sequence was not opened for so many.
        """
        if count < 1 or self.length + count > self.limit:
            raise ValueError(f"count needs 1 to {self.limit - self.length} more tokens, got {count}")
        chunk = Chunk(self, self.length, count)
        self.length += count
        return chunk

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.allocator.give_back(self.pages)


class Pages:
    """A pool of pages for all layers: keys and values (layers, N, page size, Hk, D)."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.device, self.page_size, self.count = torch.device(device), page_size, pages
        self.positions, self.width = positions, -(-positions // page_size)
        shape = (layers, pages, page_size, heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self.allocator = PageAllocator(pages)
        self._met: tuple[list[Chunk], Places] | None = None

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return self.allocator.free_pages

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer, each (N, page size, Hk, D)."""
        return self._keys[index], self._values[index]

    def places(self, chunks: list[Chunk]) -> Places:
        """Where the rows of `chunks` stand; one step's layers ask for the same ones one after another."""
        met = self._met
        if met is None or met[0] != chunks:
            met = self._met = (list(chunks), _places(chunks))
        return met[1]

    def sequence(self, limit: int) -> Sequence:
        """Open a sequence of at most `limit` tokens.

        Raises: ValueError: a pool of this size could never hold it. PagesExhaustedError: it cannot now.
        """
        most = min(self.positions, self.count * self.page_size)
        if not 1 <= limit <= most:
            raise ValueError(f"limit needs 1 to {most} tokens, got {limit}")
        return Sequence(self, self.allocator.take(-(-limit // self.page_size)), limit)


def places_of(pool: Pages, starts: Several[int], tables: Tensor, counts: Several[int]) -> Places:
    """The places of rows of sequences that another process keeps: from `starts` on, `counts` of each.

    `tables` (B, M) are on the host.
    """
    size, device = pool.page_size, pool.device
    added = torch.tensor(counts)
    ends = added.cumsum(0)
    rows = torch.repeat_interleave(added)
    positions = torch.arange(len(rows)) + (torch.tensor(starts) - ends + added)[rows]
    slots = tables[rows, positions // size] * size + positions % size
    offsets = torch.cat([ends.new_zeros(1), ends]).int() if max(counts) > 1 else None
    positions, slots = sent(torch.stack([positions, slots]), device)
    return Places(
        positions=positions,
        slots=slots,
        tables=on_device(tables, device),
        lengths=on_device((torch.tensor(starts) + added).int(), device),
        offsets=None if offsets is None else on_device(offsets, device),
        last=slice(None) if offsets is None else sent(ends - 1, device),
    )


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Host values on `device`; a GPU fetches them without anybody waiting for what it has yet to do."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def places(chunks: list[Chunk]) -> Places:
    """Where the rows of several sequences' chunks stand, one behind the other."""
    return chunks[0].places if len(chunks) == 1 else chunks[0].sequence.pool.places(chunks)


def _places(chunks: Several[Chunk]) -> Places:
    """The places of `chunks`, made on the host and sent to the pool's device."""
    pool = chunks[0].sequence.pool
    device, ends = pool.device, [chunk.end for chunk in chunks]
    tables = torch.stack([chunk.sequence.table for chunk in chunks])[:, : -(-max(ends) // pool.page_size)]
    lengths = torch.tensor(ends, dtype=torch.int32)
    offsets: Tensor | None = None
    last: Tensor | slice = slice(None)
    if any(chunk.count > 1 for chunk in chunks):
        counts = torch.tensor([0, *(chunk.count for chunk in chunks)], dtype=torch.int32)
        offsets = counts.cumsum(0, dtype=torch.int32)
        last = sent(offsets[1:].long() - 1, device)
        offsets = on_device(offsets, device)
        rows = [
            (at, slot) for chunk in chunks for at, slot in zip(chunk.positions, chunk.slots(), strict=True)
        ]
        places = torch.tensor(rows).t().contiguous()
    else:
        places = torch.stack([lengths.long() - 1] * 2)
        pages = tables.gather(1, places[1, :, None] // pool.page_size)[:, 0]
        places[1] = pages * pool.page_size + places[1] % pool.page_size
    positions, slots = sent(places, device)
    # A kernel that has to know lengths and pages on the host finds them there: it need not ask the device.
    return Places(
        positions=positions,
        slots=slots,
        tables=on_device(tables.contiguous(), device),
        lengths=on_device(lengths, device),
        offsets=offsets,
        last=last,
    )
