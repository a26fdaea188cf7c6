"""Steps of a model over a paged cache: decode rows replay CUDA graphs, prefill rows run as they come."""

from __future__ import annotations

import bisect
import inspect
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.api.graphs import captured_steps, compile_within
from layerzero.graphs.captured_steps import MAX_GRAPHS
from layerzero.graphs.step import GraphedFunction
from layerzero.kvcache import AttentionMetadata, PagedCache, PagedSequence, TokenRange
from layerzero.ops import checks
from layerzero.ops.host_copies import to_device_with_host_copy

TOO_LONG = "step_runner.too_long"
# Widths of block tables by default: in steps of so much, and none narrower than so many pages.
WIDTH_STEP, NARROWEST = 8, 128


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
        pages = torch.tensor(padding.pages, dtype=torch.int32).repeat_interleave(size)[:rows]
        slots = pages * size + torch.arange(rows, dtype=torch.int32) % size
        self._padding = torch.stack([torch.zeros_like(slots), slots, torch.ones_like(slots)])
        self._padding_tables = pages[:, None].repeat(1, self.width)
        # Numbers and tables follow each other, so that one transfer brings both, on sixteen bytes.
        self._tables_begin = 3 * rows + -3 * rows % 4
        first = torch.zeros(self._tables_begin + self._padding_tables.numel(), dtype=torch.int32)
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
        host = torch.empty(reach, dtype=torch.int32, pin_memory=self._static.is_cuda)
        host_numbers = host[: 3 * rows].view(3, rows)
        host_numbers.copy_(self._padding)
        host_numbers[:, :count] = torch.frombuffer(numbers, dtype=torch.int32).view(3, count)
        if changed:
            self._sequences, self._tables_version = sequences, version
            tables = host[self._tables_begin :].view(rows, self.width)
            tables.copy_(self._padding_tables)
            block_tables = sequences[0].block_tables.gather(
                [sequence.row for sequence in sequences], self.width
            )
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


class StepRunner:
    """A model's step over a paged cache, for whatever rows come together.

    `forward(metadata, input_ids, *values)` is a plain function over blocking ops: `metadata` says where the
    rows `input_ids` (T,) of B sequences are, `values` have a row for each sequence, and so has what it
    returns. Sequences that decode one token replay a CUDA graph of `forward`, captured for buckets of rows
    and of block tables' widths; prompts run beside them as they come, in the same call. Elsewhere than on
    CUDA `forward` simply runs. Give a call of it to `lz.batched`, and the steps of all requests are one
    replay.

    Args: a graph serves up to `max_num_seqs` sequences of at most `max_model_len` tokens; longer ones run
        without. `buckets` are the numbers of rows to capture for, by default powers of two up to
        `max_num_seqs`. `table_widths` are the widths of block tables, in pages, to capture for: a step takes
        the narrowest that holds its longest sequence. By default `max_model_len` and its eighths down to 128
        pages; the widest always holds `max_model_len`. Of more than `max_graphs` captured steps (by default
        twice what the buckets need, at least 128), or of more than `max_graph_bytes` together, the least
        recently used go: `evictions` counts them. `graphs` False never captures; True captures, and pads
        where no graph can be.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        cache: PagedCache,
        *,
        max_model_len: int,
        max_num_seqs: int = 64,
        buckets: Sequence[int] | None = None,
        table_widths: Sequence[int] | None = None,
        max_graphs: int | None = None,
        max_graph_bytes: int | None = None,
        graphs: bool | None = None,
    ) -> None:
        """Raises: ValueError: a limit, bucket or width is below 1, a bucket above `max_num_seqs`, or a width
        above that of `max_model_len`. PagesExhaustedError: no pages are left for the rows of padding."""
        checks.need_int("max_model_len", max_model_len, low=1)
        checks.need_int("max_num_seqs", max_num_seqs, low=1)
        sizes = _powers_of_two(max_num_seqs) if buckets is None else sorted(set(buckets))
        if not sizes or sizes[0] < 1 or sizes[-1] > max_num_seqs:
            raise ValueError(
                f"buckets needs numbers of rows from 1 to max_num_seqs {max_num_seqs}, got {tuple(sizes)}"
            )
        self.buckets, self.max_model_len = tuple(sizes), max_model_len
        self.table_widths = _widths(-(-max_model_len // cache.page_size), table_widths)
        if max_graphs is None:
            max_graphs = max(MAX_GRAPHS, 2 * len(sizes) * len(self.table_widths))
        self._forward, self._cache = forward, cache
        self._graphed = cache.device.type == "cuda" if graphs is None else graphs
        self._steps = captured_steps(max_graphs, max_graph_bytes)
        self._graphs: dict[tuple[int, int], GraphedFunction] = {}  # by table width and number of values
        self._padding = cache.sequence(sizes[-1]) if self._graphed else None
        self._static = {
            width: StaticMetadata(cache, width * cache.page_size, sizes[-1], self._padding)
            for width in (self.table_widths if self._graphed else ())
        }

    def __call__(self, ranges: Sequence[TokenRange], input_ids: Tensor, *values: Tensor) -> Tensor:
        """A row for each of `ranges`, in their order.

        Args: ranges: where each sequence's rows are, as `PagedSequence.extend` gives them. input_ids (T,):
            the rows behind each other. values: (B, ...) each.
        Raises: ValueError: not as many rows as `ranges` have tokens, or values of another number. What
            `forward` raises. CudaGraphUnsafeError: an op of it has no kernel that may be captured.
        """
        ranges = list(ranges)
        counts = [span.count for span in ranges]
        if not ranges or input_ids.dim() != 1 or input_ids.shape[0] != sum(counts):
            raise ValueError(
                f"input_ids needs shape ({sum(counts)},), a row for each token of {len(ranges)} ranges, "
                f"got {tuple(input_ids.shape)}"
            )
        for value in values:
            if not value.dim() or value.shape[0] != len(ranges):
                raise ValueError(f"values needs {len(ranges)} rows each, got shape {tuple(value.shape)}")
        decodes = [self._is_decode(span) for span in ranges]
        if all(decodes):
            return self._decode(ranges, input_ids, values)
        if not any(decodes):
            return self._prefill(ranges, input_ids, values)
        return self._both(ranges, decodes, input_ids, values)

    def capture(
        self,
        *values: Tensor,
        buckets: Sequence[int] | None = None,
        table_widths: Sequence[int] | None = None,
    ) -> None:
        """Capture every bucket ahead, for values of these dtypes and row shapes; nothing without graphs.

        The widest tables and most rows first; only those of `buckets` and `table_widths` where given.
        Raises: ValueError: a bucket or width that this runner has not.
        """
        widths = self.table_widths if table_widths is None else tuple(table_widths)
        for width in widths:
            if width not in self.table_widths:
                raise ValueError(f"table_widths needs some of {self.table_widths}, got {width!r}")
        if self._graphed:
            ids = torch.zeros(1, dtype=torch.int64, device=self._cache.device)
            for width in sorted(widths, reverse=True):
                self._graph(width, len(values)).capture(
                    ids, *(value[:1] for value in values), buckets=buckets
                )

    @property
    def captures(self) -> int:
        """How many graphs have been captured so far."""
        return sum(graph.captures for graph in self._graphs.values())

    @property
    def evictions(self) -> int:
        """How many captured graphs were let go for room."""
        return self._steps.evictions

    @property
    def kept(self) -> int:
        """How many captured graphs there are now."""
        return len(self._steps)

    def close(self) -> None:
        """Let the graphs go, and give the pages of the padding back."""
        self._graphs.clear()
        self._steps.clear()
        if self._padding is not None:
            self._padding.close()

    def _is_decode(self, span: TokenRange) -> bool:
        if not self._graphed or span.count != 1:
            return False
        if span.end > self.max_model_len:
            log.debug(TOO_LONG, tokens=span.end, max_model_len=self.max_model_len)
            return False
        return True

    def _graph(self, width: int, arity: int) -> GraphedFunction:
        graph = self._graphs.get((width, arity))
        if graph is None:
            static = self._static[width]

            def step(input_ids: Tensor, *values: Tensor) -> Tensor:
                return self._forward(static.metadata(input_ids.shape[0]), input_ids, *values)

            named = _with_names(step, ["input_ids", *(f"value_{number}" for number in range(arity))])
            graph = self._graphs[width, arity] = compile_within(named, self.buckets, self._steps)
        return graph

    def _width(self, ranges: list[TokenRange]) -> int:
        """The narrowest tables that hold the longest sequence."""
        widths = self.table_widths
        if len(widths) == 1:
            return widths[0]
        longest = max([span.end for span in ranges])
        return widths[bisect.bisect_left(widths, -(-longest // self._cache.page_size))]

    def _decode(self, ranges: list[TokenRange], input_ids: Tensor, values: tuple[Tensor, ...]) -> Tensor:
        largest, rows = self.buckets[-1], []
        for begin in range(0, len(ranges), largest):
            part = slice(begin, begin + largest)
            width = self._width(ranges[part])
            graph = self._graph(width, len(values))
            self._static[width].load(ranges[part])
            rows.append(graph(input_ids[part], *(value[part] for value in values)))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _prefill(self, ranges: list[TokenRange], input_ids: Tensor, values: tuple[Tensor, ...]) -> Tensor:
        return self._forward(self._cache.attention_metadata(ranges), input_ids, *values)

    def _both(
        self, ranges: list[TokenRange], decodes: list[bool], input_ids: Tensor, values: tuple[Tensor, ...]
    ) -> Tensor:
        """Decode rows by their graph and the others beside it, back in the order of `ranges`."""
        parts: list[Tensor] = []
        order: list[int] = []
        starts = [0]
        for span in ranges:
            starts.append(starts[-1] + span.count)
        for kind, run in ((True, self._decode), (False, self._prefill)):
            picked = [index for index, decode in enumerate(decodes) if decode == kind]
            rows = [row for index in picked for row in range(starts[index], starts[index + 1])]
            row_index, index = (
                to_device_with_host_copy(torch.tensor(numbers), input_ids.device)
                for numbers in (rows, picked)
            )
            parts.append(
                run([ranges[i] for i in picked], input_ids[row_index], tuple(v[index] for v in values))
            )
            order += picked
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(parts)[to_device_with_host_copy(back, input_ids.device)]


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4 ... and `largest` itself."""
    sizes = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return [*sizes, largest]


def _widths(widest: int, page_counts: Sequence[int] | None) -> tuple[int, ...]:
    """The widths of block tables to capture for, in pages, the widest last.

    Raises: ValueError: one is no number from 1 to `widest`.
    """
    if page_counts is None:
        widths = [widest]
        while (narrower := -(-widths[0] // WIDTH_STEP)) >= NARROWEST:
            widths.insert(0, narrower)
        return tuple(widths)
    for width in page_counts:
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= widest:
            raise ValueError(
                f"table_widths needs pages from 1 to {widest}, which holds max_model_len, got {width!r}"
            )
    return tuple(sorted({*page_counts, widest}))


def _with_names(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`fn` with parameters of these names, which a graph's error messages give."""

    def named(*args: Any) -> Any:
        return fn(*args)

    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    named.__qualname__ = "StepRunner"
    return named
