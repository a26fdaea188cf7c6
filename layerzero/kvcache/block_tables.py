"""A sequence of a `PagedCache` as an object, the token ranges that it grows by, and its block table."""

from __future__ import annotations

from array import array
from typing import Protocol
from weakref import ReferenceType

import torch
from torch import Tensor

from layerzero.kvcache.block_allocator import PageAllocator
from layerzero.ops import checks


class TokenRange:
    """`count` tokens that a sequence has grown by, from position `start` on; it stays what it is."""

    __slots__ = ("count", "sequence", "start")

    def __init__(self, sequence: PagedSequence, start: int, count: int) -> None:
        self.sequence, self.start, self.count = sequence, start, count

    @property
    def end(self) -> int:
        """The sequence's length with these tokens."""
        return self.start + self.count

    def tokens(self) -> list[TokenRange]:
        """A range of each token."""
        return [TokenRange(self.sequence, start, 1) for start in range(self.start, self.end)]

    def __repr__(self) -> str:
        return f"TokenRange({self.sequence!r}, {self.start}, {self.count})"


class SequenceOwner(Protocol):
    """What a sequence asks of its cache."""

    def reserve(self, sequence: int, tokens: int) -> None: ...
    def rollback(self, sequence: int, tokens: int) -> None: ...
    def free(self, sequence: int) -> None: ...


class PagedSequence:
    """One sequence of a `PagedCache`, which gave it; a context manager that frees it.

    `number` is what the cache's own methods know it by, `pages` are its pages in order, `length` its tokens,
    of which `capacity` have a slot before the cache is asked. Ranges of a freed sequence still name the
    slots that it had: a batch that has begun continues with the rows of a caller that has gone, and a caller
    that has those pages next writes them in a later batch.
    """

    __slots__ = ("_allocator", "_cache", "_length", "block_tables", "capacity", "number", "pages", "row")

    def __init__(
        self,
        number: int,
        cache: ReferenceType[SequenceOwner],
        allocator: PageAllocator,
        block_tables: BlockTables,
    ) -> None:
        self.number, self._cache, self._allocator, self.block_tables = number, cache, allocator, block_tables
        self._length = self.capacity = 0
        self.pages: list[int] = []
        self.row = block_tables.allocate_row()

    def __del__(self) -> None:
        # Not before: who reads the row may be a batch that outlives the sequence.
        self.block_tables.free_row(self.row)

    @property
    def length(self) -> int:
        """The sequence's tokens; setting it to less forgets those behind, as the cache's `rollback` does."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        self._owner().rollback(self.number, tokens)

    def extend(self, count: int = 1) -> TokenRange:
        """Places for the next `count` tokens, which the length counts from here on.

        Write them with `append_kv` before anything reads them.
        Raises: PagesExhaustedError: the pool is full; nothing has changed. FreedSequenceError. ValueError,
            TypeError: `count` is no positive number.
        """
        start = self._length
        if count.__class__ is not int or count < 1 or start + count > self.capacity:
            self._owner().reserve(self.number, start + checks.need_int("count", count, low=1))
        self._length = start + count
        self._allocator.version += 1
        return TokenRange(self, start, count)

    def grow(self, count: int) -> TokenRange:
        """`extend` by tokens whose room has been seen to; for the cache to call."""
        start = self._length
        self._length = start + count
        return TokenRange(self, start, count)

    def set_state(self, length: int, pages: list[int], capacity: int) -> None:
        """Have so many tokens, `pages`, and slots for tokens up to `capacity`; for the cache to call."""
        if pages != self.pages:
            self.block_tables.write(self.row, pages, self.pages)
            self.pages = pages
        self._length, self.capacity = length, capacity

    def _owner(self) -> SequenceOwner:
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

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<sequence {self.number} of {self._length} tokens>"


class BlockTables:
    """The page tables of all sequences, a row each of (R, W) int32 on the host.

    A row belongs to a sequence until the object dies. `version` rises with every entry that changes.
    """

    __slots__ = ("_free", "_storage", "version")

    def __init__(self) -> None:
        self._storage = _new_storage(64, 16)  # replaced as one: another thread may pick meanwhile
        self._free = list(range(63, -1, -1))
        self.version = 0

    def allocate_row(self) -> int:
        """A row of zeros."""
        count, width = self._storage[1].shape
        if not self._free:
            self._grow(2 * count, width)
            self._free += range(2 * count - 1, count - 1, -1)  # in place: others give back meanwhile
        row = self._free.pop()
        self._storage[0][row * width : (row + 1) * width] = array("i", bytes(4 * width))
        self.version += 1
        return row

    def free_row(self, row: int) -> None:
        """Let a later sequence have the row."""
        self._free.append(row)

    def write(self, row: int, pages: list[int], before: list[int]) -> None:
        """Let the row hold `pages`, where it held `before`."""
        count, width = self._storage[1].shape
        if width < len(pages):
            width = max(2 * width, len(pages))
            self._grow(count, width)
        start = len(before) if pages[: len(before)] == before else 0
        new = pages[start:] + [0] * (len(before) - len(pages))
        begin = row * width + start
        self._storage[0][begin : begin + len(new)] = array("i", new)
        self.version += 1

    def gather(self, rows_: list[int], width: int) -> Tensor:
        """A copy of the first entries of some rows, (B, width) or as wide as all rows are."""
        numbers, rows = self._storage
        whole = rows.shape[1]
        width = min(width, whole)
        if len(rows_) == 1 and width:
            begin = rows_[0] * whole
            entries = numbers[begin : begin + width]
            return torch.frombuffer(entries, dtype=torch.int32).view(1, width)
        if not rows_:
            return rows[:0, :width]
        where = torch.frombuffer(array("q", rows_), dtype=torch.int64)
        return rows.narrow(1, 0, width).index_select(0, where)

    def _grow(self, count: int, width: int) -> None:
        numbers, rows = _new_storage(count, width)
        old_rows = self._storage[1]
        rows[: old_rows.shape[0], : old_rows.shape[1]] = old_rows
        self._storage = numbers, rows


def _new_storage(count: int, width: int) -> tuple[array[int], Tensor]:
    """An array of zeros, which Python writes at once, and its memory as a tensor (count, width)."""
    numbers = array("i", bytes(4 * count * width))
    with torch.inference_mode(False):
        return numbers, torch.frombuffer(numbers, dtype=torch.int32).view(count, width)
