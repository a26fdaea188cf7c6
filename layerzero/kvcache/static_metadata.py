"""Attention metadata in memory that stays where it is, so that CUDA graphs read it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch

from layerzero.kvcache.attention_metadata import AttentionMetadata
from layerzero.kvcache.block_tables import PagedSequence, TokenRange
from layerzero.kvcache.paged_cache import PagedCache


class StaticMetadata:
    """Attention metadata of at most `rows` sequences, a token each, in memory that stays where it is.

    Graphs read it. It is written once a step, its block tables only when sequences join, leave or grow by a
    page. Tables have one width, so that one graph serves every length up to `max_model_len`; rows of padding
    write slots that no sequence has.
    """

    def __init__(
        self, cache: PagedCache, max_model_len: int, rows: int, padding: PagedSequence | None = None
    ) -> None:
        """`padding` has slots for the rows of padding; without one it takes its own.

        Raises: PagesExhaustedError: the pool has no pages left for them.
        """
        size = cache.page_size
        self.rows, self.width = rows, -(-max_model_len // size)
        self._cache = cache
        self._own_padding = cache.sequence(rows) if padding is None else None
        padding = padding or self._own_padding
        assert padding is not None
        pages = torch.tensor(padding.pages, dtype=torch.int32, device="cpu").repeat_interleave(size)[:rows]
        slots = pages * size + torch.arange(rows, dtype=torch.int32, device="cpu") % size
        self._padding = torch.stack([torch.zeros_like(slots), slots, torch.ones_like(slots)])
        self._padding_tables = pages[:, None].repeat(1, self.width)
        # Numbers and tables follow each other, so that one transfer brings both, on sixteen bytes.
        self._tables_begin = 3 * rows + -3 * rows % 4
        first = slots.new_zeros(self._tables_begin + self._padding_tables.numel())
        first[: 3 * rows] = self._padding.flatten()
        first[self._tables_begin :] = self._padding_tables.flatten()
        with torch.inference_mode(False):
            self._static = first.to(cache.device, copy=True)
        self._numbers = self._static[: 3 * rows].view(3, rows)
        self._tables = self._static[self._tables_begin :].view(rows, self.width)
        self._ranges: list[TokenRange] = []
        self._sequences: list[PagedSequence] = []  # whose tables are in the first rows
        self._tables_version: int | None = None

    def load(self, ranges: Sequence[TokenRange]) -> None:
        """Let `ranges`, a token each, be what the first rows are from now on."""
        ranges, version = list(ranges), ranges[0].sequence.block_tables.version
        if ranges == self._ranges and version == self._tables_version:  # another layer of the same step
            return
        self._ranges, count, rows = ranges, len(ranges), self.rows
        sequences, starts = [span.sequence for span in ranges], [span.start for span in ranges]
        size = self._cache.page_size
        slots = [s.pages[n // size] * size + n % size for s, n in zip(sequences, starts, strict=True)]
        numbers = array("i", [*starts, *slots, *(start + 1 for start in starts)])
        changed = sequences != self._sequences or version != self._tables_version
        reach = self._static.numel() if changed else 3 * rows
        # A GPU fetches it out of pinned memory in its turn, straight into what the graphs read.
        host = torch.empty(reach, dtype=torch.int32, device="cpu", pin_memory=self._static.is_cuda)
        host_numbers = host[: 3 * rows].view(3, rows)
        host_numbers.copy_(self._padding)
        host_numbers[:, :count] = torch.frombuffer(numbers, dtype=torch.int32).view(3, count)
        if changed:
            self._sequences, self._tables_version = sequences, version
            tables = host[self._tables_begin :].view(rows, self.width)
            tables.copy_(self._padding_tables)
            block_tables = sequences[0].block_tables.gather([each.row for each in sequences], self.width)
            tables[:count, : block_tables.shape[1]] = block_tables
        self._static[:reach].copy_(host, non_blocking=True)

    def metadata(self, rows: int) -> AttentionMetadata:
        """The metadata of the first `rows` rows, whatever is loaded."""
        positions, slots, seq_lens = self._numbers[:, :rows]
        return AttentionMetadata(positions, slots, self._tables[:rows], seq_lens, None, slice(None))

    def close(self) -> None:
        """Give the pages of its own padding back."""
        if self._own_padding is not None:
            self._own_padding.close()


class StaticPrefillMetadata:
    """Attention metadata of at most `rows` rows of at most `sequences` sequences, any number of rows each.

    Graphs read it. It is written once a step. Rows of padding are one more sequence of a single token, and
    write `padding`'s slots; sequences that are not there have no rows.
    """

    def __init__(
        self, cache: PagedCache, width: int, rows: int, sequences: int, padding: PagedSequence
    ) -> None:
        """Tables are `width` pages wide."""
        self.sequences, self.width = sequences, width
        self._cache = cache
        size, pages = cache.page_size, padding.pages
        self._padding_slots = [pages[n // size] * size + n % size for n in range(len(pages) * size)]
        self._padding_page = pages[0]
        # Positions, slots, lengths, offsets, last rows, each on sixteen bytes, then the tables.
        counts = (rows, rows, sequences + 1, sequences + 2, sequences)
        self._begins = [0, *accumulate(count + -count % 4 for count in counts)]
        numbers = torch.zeros(self._begins[-1] + (sequences + 1) * width, dtype=torch.int32, device="cpu")
        with torch.inference_mode(False):
            self._static = numbers.to(cache.device, copy=True)
        self.ranges: list[TokenRange] = []  # those that are loaded

    def load(self, ranges: Sequence[TokenRange], rows: int) -> None:
        """Let `ranges` be what the first of `rows` rows are from now on, and padding the others."""
        self.ranges, count = list(ranges), len(ranges)
        positions = [place for span in ranges for place in range(span.start, span.end)]
        slots = self._cache.slot_mapping(ranges)
        missing, unused = rows - len(positions), self.sequences - count
        ends = [0, *accumulate(span.count for span in ranges)]
        numbers = array("i")
        for begin, values in zip(
            self._begins,
            (
                positions + [0] * missing, slots + self._padding_slots[:missing],
                [span.end for span in ranges] + [1] * (unused + 1), ends + [rows] * (unused + 1),
                [end - 1 for end in ends[1:]] + [0] * unused,
            ),
            strict=False,
        ):  # fmt: skip
            numbers.extend([0] * (begin - len(numbers)))
            numbers.extend(values)
        # A GPU fetches it out of pinned memory in its turn; tables of sequences without rows are not read.
        tables_begin = self._begins[-1]
        reach = tables_begin + (count + 1) * self.width
        host = torch.empty(reach, dtype=torch.int32, device="cpu", pin_memory=self._static.is_cuda)
        host[: len(numbers)] = torch.frombuffer(numbers, dtype=torch.int32)
        tables = host[tables_begin:].view(count + 1, self.width)
        block_tables = ranges[0].sequence.block_tables
        gathered = block_tables.gather([span.sequence.row for span in ranges], self.width)
        tables[:count, : gathered.shape[1]] = gathered
        tables[:count, gathered.shape[1] :] = 0
        tables[count] = self._padding_page
        self._static[:reach].copy_(host, non_blocking=True)

    def metadata(self, rows: int) -> AttentionMetadata:
        """The metadata of `rows` rows, whatever is loaded."""
        positions, slots, lengths, offsets, last = self._begins[:-1]
        static, sequences = self._static, self.sequences
        tables = static[self._begins[-1] :].view(sequences + 1, self.width)
        return AttentionMetadata(
            static[positions : positions + rows], static[slots : slots + rows], tables,
            static[lengths : lengths + sequences + 1], static[offsets : offsets + sequences + 2],
            static[last : last + sequences],
        )  # fmt: skip
