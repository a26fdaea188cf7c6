"""Steps of a model over a paged cache, for decoding and for prompts, by CUDA graphs where there are some."""

from __future__ import annotations

import bisect
import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.api.graphs import captured_steps, compile_within
from layerzero.graphs.captured_steps import MAX_GRAPHS
from layerzero.graphs.step import GraphedFunction
from layerzero.kvcache import PagedCache, TokenRange
from layerzero.kvcache.static_metadata import StaticMetadata, StaticPrefillMetadata
from layerzero.ops import checks
from layerzero.spec.errors import CudaGraphUnsafeError
from layerzero.warmup.garbage import freeze_again

TOO_LONG = "step_runner.too_long"
PREFILL_UNCAPTURED = "step_runner.prefill_not_captured"
# Widths of block tables by default: in steps of so much, and none narrower than so many pages.
WIDTH_STEP, NARROWEST = 8, 128
# Tokens of a sequence that take rows of their own in a graph of decoding: each row reads all keys before it.
MAX_DRAFTED = 16


class StepRunner:
    """A model's step over a paged cache, for whatever rows come together.

    `forward(metadata, input_ids, *values)` is a plain function over blocking ops: `metadata` says where the
    rows `input_ids` (T,) of B sequences are, `values` have a row for each sequence, and so has what it
    returns. Sequences that decode one token replay a CUDA graph of `forward`, captured for buckets of rows
    and of block tables' widths. A step with prompts is one run of `forward` over all rows: by a graph too
    where one of `prefill_buckets` holds them, else as they come. Elsewhere than on CUDA `forward` simply
    runs. Give a call of it to `lz.batched`, and the steps of all requests are one replay.

    Args: a graph serves up to `max_num_seqs` sequences of at most `max_model_len` tokens; a step with a
        longer one runs without. `buckets` are the numbers of rows to capture for, by default powers of two
        up to `max_num_seqs`. `table_widths` are the widths of block tables, in pages, to capture for: a step
        takes the narrowest that holds its longest sequence. By default `max_model_len` and its eighths down
        to 128 pages; the widest always holds `max_model_len`. Of more than `max_graphs` captured steps (by
        default twice what the buckets need, at least 128), or of more than `max_graph_bytes` together, the
        least recently used go: `evictions` counts them. `graphs` False never captures; True captures, and
        pads where no graph can be. `prefill_buckets` are the numbers of rows to capture steps with prompts
        for, of at most `max_num_seqs` sequences and without `values`; none by default. Where a kernel that
        they need may not be captured, there are none, and the event `step_runner.prefill_not_captured` says
        why.
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
        prefill_buckets: Sequence[int] = (),
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
        for rows in prefill_buckets:
            checks.need_int("prefill_buckets", rows, low=1)
        self.buckets, self.max_model_len = tuple(sizes), max_model_len
        self.table_widths = _widths(-(-max_model_len // cache.page_size), table_widths)
        self._forward, self._cache, self._max_num_seqs = forward, cache, max_num_seqs
        self._graphed = cache.device.type == "cuda" if graphs is None else graphs
        self.prefill_buckets: tuple[int, ...] = tuple(sorted(set(prefill_buckets))) if self._graphed else ()
        if max_graphs is None:
            graph_count = 2 * (len(sizes) + len(self.prefill_buckets)) * len(self.table_widths)
            max_graphs = max(MAX_GRAPHS, graph_count)
        self._steps = captured_steps(max_graphs, max_graph_bytes)
        self._graphs: dict[
            tuple[int, int], GraphedFunction[Tensor]
        ] = {}  # by table width and number of values
        # A slot for each row of padding; a step with prompts has more rows than the bucket before it.
        gaps = [high - low for low, high in itertools.pairwise((0, *self.prefill_buckets))]
        self._padding = cache.sequence(max(sizes[-1], *gaps, 1)) if self._graphed else None
        self._static = {
            width: StaticMetadata(cache, width * cache.page_size, sizes[-1], self._padding)
            for width in (self.table_widths if self._graphed else ())
        }
        self._static_prefill: dict[int, StaticPrefillMetadata] = {}
        self._prefill_graphs: dict[int, GraphedFunction[Tensor]] = {}  # by table width

    def __call__(self, ranges: Sequence[TokenRange], input_ids: Tensor, *values: Tensor) -> Tensor:
        """A row for each of `ranges`, in their order.

        Args: ranges: where each sequence's rows are, as `PagedSequence.extend` gives them. input_ids (T,):
            the rows behind each other. values: (B, ...) each.
        Raises: ValueError: not as many rows as `ranges` have tokens, or values of another number. What
            `forward` raises. CudaGraphUnsafeError: an op of it has no kernel that may be captured.
        """
        ranges = list(ranges)
        counts = _need_rows(ranges, input_ids)
        for value in values:
            if not value.dim() or value.shape[0] != len(ranges):
                raise ValueError(f"values needs {len(ranges)} rows each, got shape {tuple(value.shape)}")
        longest = max(span.end for span in ranges)
        if self._graphed and longest > self.max_model_len:
            log.debug(TOO_LONG, tokens=longest, max_model_len=self.max_model_len)
        elif self._graphed and len(counts) == sum(counts):
            return self._decode(ranges, input_ids, values)
        elif self._has_prefill_bucket(len(counts), sum(counts), values):
            return self._captured_prefill(ranges, input_ids)
        return self._prefill(ranges, input_ids, values)

    def all_positions(self, ranges: Sequence[TokenRange], input_ids: Tensor) -> Tensor:
        """A row for each token of `ranges`, as the verification of a draft needs them.

        Up to 16 tokens a sequence, or all that fit the largest bucket, replay the graphs of decoding: each
        token is the row of a sequence that ends with it. Else `forward` runs once and returns its rows for
        `metadata.logits_indices`, which are all.

        Args: ranges, input_ids: as of a call. Raises: as a call does.
        """
        ranges = list(ranges)
        counts = _need_rows(ranges, input_ids)
        if self._graphed and (max(counts) <= MAX_DRAFTED or sum(counts) <= self.buckets[-1]):
            return self([token for span in ranges for token in span.tokens()], input_ids)
        metadata = replace(self._cache.attention_metadata(ranges), logits_indices=slice(None))
        return self._forward(metadata, input_ids)

    def capture(
        self,
        *values: Tensor,
        buckets: Sequence[int] | None = None,
        table_widths: Sequence[int] | None = None,
        prefill_buckets: Sequence[int] | None = None,
    ) -> None:
        """Capture every bucket ahead, for values of these dtypes and row shapes; nothing without graphs.

        The widest tables and most rows first; only those of `buckets`, `prefill_buckets` and `table_widths`
        where given. Steps with prompts have no values.
        Raises: ValueError: a bucket or width that this runner has not. PagesExhaustedError: no pages are
            left for the rows of a step with prompts.
        """
        prompts = self.prefill_buckets if prefill_buckets is None else tuple(sorted(set(prefill_buckets)))
        for rows in prompts:
            if rows not in self.prefill_buckets and self._graphed:
                raise ValueError(f"prefill_buckets needs some of {self.prefill_buckets}, got {rows!r}")
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
                for rows in () if values else reversed(prompts):
                    self._capture_prefill(width, rows, ids)
            freeze_again()

    @property
    def captures(self) -> int:
        """How many graphs have been captured so far."""
        graphs = (*self._graphs.values(), *self._prefill_graphs.values())
        return sum(graph.captures for graph in graphs)

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
        self._prefill_graphs.clear()
        self._steps.clear()
        if self._padding is not None:
            self._padding.close()

    def _graph(self, width: int, arity: int) -> GraphedFunction[Tensor]:
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

    # -- steps with prompts -----------------------------------------------------------------------------

    def _has_prefill_bucket(self, count: int, rows: int, values: tuple[Tensor, ...]) -> bool:
        buckets = self.prefill_buckets
        return bool(buckets) and rows <= buckets[-1] and count <= self._max_num_seqs and not values

    def _prefill_graph(self, width: int) -> tuple[StaticPrefillMetadata, GraphedFunction[Tensor]]:
        graph = self._prefill_graphs.get(width)
        if graph is None:
            assert self._padding is not None
            static = self._static_prefill[width] = StaticPrefillMetadata(
                self._cache, width, self.prefill_buckets[-1], self._max_num_seqs, self._padding
            )

            def step(input_ids: Tensor) -> Tensor:
                rows = input_ids.shape[0]
                if rows in self.prefill_buckets:
                    return self._forward(static.metadata(rows), input_ids)
                return self._prefill(static.ranges, input_ids, ())  # what it needs is loading

            graph = self._prefill_graphs[width] = compile_within(
                step, self.prefill_buckets, self._steps, result_rows=self._max_num_seqs
            )
        return self._static_prefill[width], graph

    def _capture_prefill(self, width: int, rows: int, input_ids: Tensor) -> None:
        """Capture a bucket over as few sequences as can have so many rows. Raises: PagesExhaustedError."""
        longest = min(self.max_model_len, width * self._cache.page_size)
        counts = [min(longest, rows - begin) for begin in range(0, rows, longest)]
        if len(counts) > self._max_num_seqs:
            return  # no step has so many rows
        static, graph = self._prefill_graph(width)
        with contextlib.ExitStack() as stack:
            sequences = [stack.enter_context(self._cache.sequence(count)) for count in counts]
            static.load([s.extend(count) for s, count in zip(sequences, counts, strict=True)], rows)
            try:
                graph.capture(input_ids, buckets=[rows])
            except CudaGraphUnsafeError as error:
                self._give_up_prefill(error)

    def _give_up_prefill(self, error: CudaGraphUnsafeError) -> None:
        log.warning(PREFILL_UNCAPTURED, why=str(error))
        self.prefill_buckets = ()

    def _captured_prefill(self, ranges: list[TokenRange], input_ids: Tensor) -> Tensor:
        static, graph = self._prefill_graph(self._width(ranges))
        place = bisect.bisect_left(self.prefill_buckets, input_ids.shape[0])
        static.load(ranges, self.prefill_buckets[place])
        try:
            return graph(input_ids)[: len(ranges)]
        except CudaGraphUnsafeError as error:
            self._give_up_prefill(error)
            return self._prefill(ranges, input_ids, ())


def _need_rows(ranges: list[TokenRange], input_ids: Tensor) -> list[int]:
    """The tokens of each range, once there is a row for each. Raises: ValueError."""
    counts = [span.count for span in ranges]
    if not ranges or input_ids.dim() != 1 or input_ids.shape[0] != sum(counts):
        raise ValueError(
            f"input_ids needs shape ({sum(counts)},), a row for each token of {len(ranges)} ranges, "
            f"got {tuple(input_ids.shape)}"
        )
    return counts


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4 ... and `largest` itself."""
    sizes = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return [*sizes, largest]


def _widths(widest: int, page_counts: Sequence[int] | None) -> tuple[int, ...]:
    """Widths of block tables in pages, the widest last. Raises: ValueError: one is not in [1, `widest`]."""
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
