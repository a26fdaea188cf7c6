"""The pages that keys and values lie in, and where the rows of a forward stand in them.

A sequence takes all the pages it may ever need when it opens and gives them back when it closes, so that
no request runs out of memory half way; a pool that cannot hold it says so at once. The allocator is the
library's. Its `PagedCache` can reserve pages so too, but keeps them as lists and makes a crowd's table of
them anew for each step; here a sequence's table is a row of the pool's, made once, and a step picks its
callers' rows in one go.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import numpy as np
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


class Sequence:
    """One request's pages; a context manager that gives them back."""

    def __init__(self, pool: Pages, pages: list[int], limit: int) -> None:
        self.pool, self.pages, self.limit = pool, pages, limit
        self.length = 0
        self.row = pool.tables.take(pages)
        self.table = torch.from_numpy(pool.tables.rows[self.row])

    def extend(self, count: int) -> Chunk:
        """Places for the next `count` tokens.

        Raises: ValueError: the sequence was not opened for so many.
        """
        if count < 1 or self.length + count > self.limit:
            raise ValueError(f"count needs 1 to {self.limit - self.length} more tokens, got {count}")
        chunk = Chunk(self, self.length, count)
        self.length += count
        return chunk

    def close(self) -> None:
        """Give its pages back."""
        self.pool.tables.give_back(self.row)
        self.pool.allocator.give_back(self.pages)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Tables:
    """The tables of all open sequences, one row each: `rows` (R, width), int32, on the host."""

    def __init__(self, width: int) -> None:
        self.rows = np.zeros((64, width), np.int32)
        self._free = list(range(64))

    def take(self, pages: list[int]) -> int:
        """The row that holds `pages` from now on, zeros behind them."""
        if not self._free:
            self._free = list(range(len(self.rows), 2 * len(self.rows)))
            self.rows = np.concatenate((self.rows, np.zeros_like(self.rows)))
        row = self._free.pop()
        self.rows[row, : len(pages)] = pages
        self.rows[row, len(pages) :] = 0
        return row

    def give_back(self, row: int) -> None:
        """Let the next sequence have the row."""
        self._free.append(row)


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
        self.tables = Tables(self.width)
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
    size, device, known = pool.page_size, pool.device, pool.tables.rows
    # By numpy: it makes a hundred numbers an array in a third of the time that torch makes them a tensor.
    starts = np.array([chunk.start for chunk in chunks])
    owners = np.array([chunk.sequence.row for chunk in chunks])
    offsets: Tensor | None = None
    last: Tensor | slice = slice(None)
    if any(chunk.count > 1 for chunk in chunks):
        counts = np.array([chunk.count for chunk in chunks])
        behind = counts.cumsum()
        ends, positions = starts + counts, np.repeat(starts - behind + counts, counts) + np.arange(behind[-1])
        rows = np.repeat(owners, counts)
        offsets = on_device(torch.from_numpy(np.append(0, behind).astype(np.int32)), device)
        last = sent(torch.from_numpy(behind - 1), device)
    else:
        ends, positions, rows = starts + 1, starts, owners
    slots = known[rows, positions // size] * size + positions % size
    here = sent(torch.from_numpy(np.stack((positions, slots))), device)
    # A kernel that has to know lengths and pages on the host finds them there: it need not ask the device.
    return Places(
        positions=here[0],
        slots=here[1],
        tables=on_device(torch.from_numpy(known[owners, : -(-int(ends.max()) // size)]), device),
        lengths=on_device(torch.from_numpy(ends.astype(np.int32)), device),
        offsets=offsets,
        last=last,
    )
