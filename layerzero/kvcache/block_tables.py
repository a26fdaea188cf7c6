"""A sequence of a `PagedCache` as an object, the spans that it grows by, and the table of its pages."""

from __future__ import annotations

from array import array
from types import TracebackType
from typing import Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from layerzero.kvcache.block_allocator import PageAllocator
from layerzero.ops import checks


class Span:
    """`count` tokens that a sequence has grown by, from position `start` on; it stays what it is."""

    __slots__ = ("count", "sequence", "start")

    def __init__(self, sequence: PagedSequence, start: int, count: int) -> None:
        self.sequence, self.start, self.count = sequence, start, count

    @property
    def end(self) -> int:
        """The sequence's length with these tokens."""
        return self.start + self.count

    def __repr__(self) -> str:
        return f"Span({self.sequence!r}, {self.start}, {self.count})"


class Owner(Protocol):
    """What a sequence asks of its cache."""

    def reserve(self, sequence: int, tokens: int) -> None: ...
    def rollback(self, sequence: int, tokens: int) -> None: ...
    def free(self, sequence: int) -> None: ...


class PagedSequence:
    """One sequence of a `PagedCache`, which gave it; a context manager that frees it.

    `number` is what the cache's own methods know it by, `pages` are its pages in order, `length` its tokens,
    of which `room` can have a place before the cache is asked. Spans of a freed sequence still name the
    places that it had: a batch that has begun goes on with the rows of a caller that has gone, and whoever
    has those pages next writes them in a later batch.
    """

    __slots__ = ("_allocator", "_cache", "_length", "number", "pages", "room", "row", "tables")

    def __init__(
        self, number: int, cache: ReferenceType[Owner], allocator: PageAllocator, tables: Tables
    ) -> None:
        self.number, self._cache, self._allocator, self.tables = number, cache, allocator, tables
        self._length = self.room = 0
        self.pages: list[int] = []
        self.row = tables.take()

    def __del__(self) -> None:
        # Not before: who reads the row may be a batch that outlives the sequence.
        self.tables.give_back(self.row)

    @property
    def length(self) -> int:
        """The sequence's tokens; setting it to less forgets those behind, as the cache's `rollback` does."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        self._owner().rollback(self.number, tokens)

    def extend(self, count: int = 1) -> Span:
        """Places for the next `count` tokens, which the length counts from here on.

        Write them with `append_kv` before anything reads them.
        Raises: PagesExhaustedError: the pool is full; nothing has changed. FreedSequenceError. ValueError,
            TypeError: `count` is no positive number.
        """
        start = self._length
        if count.__class__ is not int or count < 1 or start + count > self.room:
            self._owner().reserve(self.number, start + checks.need_int("count", count, low=1))
        self._length = start + count
        self._allocator.epoch += 1
        return Span(self, start, count)

    def grow(self, count: int) -> Span:
        """`extend` by tokens whose room has been seen to; for the cache to call."""
        start = self._length
        self._length = start + count
        return Span(self, start, count)

    def settle(self, length: int, pages: list[int], room: int) -> None:
        """Have so many tokens, `pages`, and a place for each token up to `room`; for the cache to call."""
        if pages != self.pages:
            self.tables.write(self.row, pages, self.pages)
            self.pages = pages
        self._length, self.room = length, room

    def _owner(self) -> Owner:
        cache = self._cache()
        if cache is None:
            raise ReferenceError(f"sequence {self.number} needs its cache, got one that is gone")
        return cache

    def close(self) -> None:
        """Free it; nothing where its cache is gone.

        Raises: FreedSequenceError: it was freed before.
        """
        cache = self._cache()
        if cache is not None:
            cache.free(self.number)

    def __enter__(self) -> PagedSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<sequence {self.number} of {self._length} tokens>"


class Tables:
    """The page tables of all sequences, a row each of (R, W) int32 on the host.

    A row belongs to a sequence until the object dies. `version` rises with every entry that changes.
    """

    __slots__ = ("_free", "_laid", "version")

    def __init__(self) -> None:
        self._laid = _laid_out(64, 16)  # replaced as one: another thread may pick meanwhile
        self._free = list(range(63, -1, -1))
        self.version = 0

    def take(self) -> int:
        """A row of zeros."""
        count, width = self._laid[1].shape
        if not self._free:
            self._grow(2 * count, width)
            self._free += range(2 * count - 1, count - 1, -1)  # in place: others give back meanwhile
        row = self._free.pop()
        self._laid[0][row * width : (row + 1) * width] = array("i", bytes(4 * width))
        self.version += 1
        return row

    def give_back(self, row: int) -> None:
        """Let a later sequence have the row."""
        self._free.append(row)

    def write(self, row: int, pages: list[int], before: list[int]) -> None:
        """Let the row hold `pages`, where it held `before`."""
        count, width = self._laid[1].shape
        if width < len(pages):
            width = max(2 * width, len(pages))
            self._grow(count, width)
        at = len(before) if pages[: len(before)] == before else 0
        new = pages[at:] + [0] * (len(before) - len(pages))
        begin = row * width + at
        self._laid[0][begin : begin + len(new)] = array("i", new)
        self.version += 1

    def pick(self, owners: list[int], width: int) -> Tensor:
        """A copy of the first entries of some rows, (B, width) or as wide as all rows are."""
        numbers, rows = self._laid
        whole = rows.shape[1]
        width = min(width, whole)
        if len(owners) == 1 and width:
            begin = owners[0] * whole
            own = numbers[begin : begin + width]
            return torch.frombuffer(own, dtype=torch.int32).view(1, width)
        if not owners:
            return rows[:0, :width]
        where = torch.frombuffer(array("q", owners), dtype=torch.int64)
        return rows.narrow(1, 0, width).index_select(0, where)

    def _grow(self, count: int, width: int) -> None:
        numbers, rows = _laid_out(count, width)
        known = self._laid[1]
        rows[: known.shape[0], : known.shape[1]] = known
        self._laid = numbers, rows


def _laid_out(count: int, width: int) -> tuple[array[int], Tensor]:
    """An array of zeros, which Python writes at once, and its memory as a tensor (count, width)."""
    numbers = array("i", bytes(4 * count * width))
    with torch.inference_mode(False):
        return numbers, torch.frombuffer(numbers, dtype=torch.int32).view(count, width)
