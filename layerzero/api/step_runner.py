"""Steps of a model over a paged cache: decode rows replay CUDA graphs, prefill rows run as they come."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.api.graphs import compile as compile_step
from layerzero.graphs.step import GraphedFunction
from layerzero.kvcache import AttentionMetadata, PagedCache, PagedSequence, TokenRange
from layerzero.ops import checks
from layerzero.ops.host_copies import to_device_with_host_copy

TOO_LONG = "step_runner.too_long"


class StaticMetadata:
    """Attention metadata of at most `rows` sequences, a token each, in memory that stays where it is.

    Graphs read it. It is written once a step, its block tables only when sequences join, leave or grow by a
    page. Tables have one width, so that one graph serves every length up to `max_model_len`; rows of padding
    write slots of their own that no sequence has.
    """

    def __init__(self, cache: PagedCache, max_model_len: int, rows: int) -> None:
        """Raises: PagesExhaustedError: the pool has no pages left for the rows of padding."""
        size = cache.page_size
        self.rows, self.width = rows, -(-max_model_len // size)
        self._cache = cache
        self._padding_sequence = cache.sequence(rows)
        pages = torch.tensor(self._padding_sequence.pages, dtype=torch.int32).repeat_interleave(size)[:rows]
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
        """Give the pages of the padding back."""
        self._padding_sequence.close()


class StepRunner:
    """A model's step over a paged cache, for whatever rows come together.

    `forward(metadata, input_ids, *values)` is a plain function over blocking ops: `metadata` says where the
    rows `input_ids` (T,) of B sequences are, `values` have a row for each sequence, and so has what it
    returns. Sequences that decode one token replay a CUDA graph of `forward`, captured for buckets of rows;
    prompts run beside them as they come, in the same call. Elsewhere than on CUDA `forward` simply runs.
    Give a call of it to `lz.batched`, and the steps of all requests are one replay.

    Args: a graph serves up to `max_num_seqs` sequences of at most `max_model_len` tokens; longer ones run
        without. `buckets` are the numbers of rows to capture for, by default powers of two up to
        `max_num_seqs`. `graphs` False never captures; True captures, and pads where no graph can be.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        cache: PagedCache,
        *,
        max_model_len: int,
        max_num_seqs: int = 64,
        buckets: Sequence[int] | None = None,
        graphs: bool | None = None,
    ) -> None:
        """Raises: ValueError: a limit or a bucket is below 1, or a bucket above `max_num_seqs`.
        PagesExhaustedError: the pool has no pages left for the rows of padding."""
        checks.need_int("max_model_len", max_model_len, low=1)
        checks.need_int("max_num_seqs", max_num_seqs, low=1)
        sizes = _powers_of_two(max_num_seqs) if buckets is None else sorted(set(buckets))
        if not sizes or sizes[0] < 1 or sizes[-1] > max_num_seqs:
            raise ValueError(
                f"buckets needs numbers of rows from 1 to max_num_seqs {max_num_seqs}, got {tuple(sizes)}"
            )
        self.buckets, self.max_model_len = tuple(sizes), max_model_len
        self._forward, self._cache = forward, cache
        self._graphed = cache.device.type == "cuda" if graphs is None else graphs
        self._static = StaticMetadata(cache, max_model_len, sizes[-1]) if self._graphed else None
        self._graph_by_arity: dict[int, GraphedFunction] = {}

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

    def capture(self, *values: Tensor) -> None:
        """Capture every bucket ahead, for values of these dtypes and row shapes; nothing without graphs."""
        if self._static is not None:
            ids = torch.zeros(1, dtype=torch.int64, device=self._cache.device)
            self._graph(len(values)).capture(ids, *(value[:1] for value in values))

    @property
    def captures(self) -> int:
        """How many graphs have been captured so far."""
        return sum(graph.captures for graph in self._graph_by_arity.values())

    def close(self) -> None:
        """Let the graphs go, and give the pages of the padding back."""
        self._graph_by_arity.clear()
        if self._static is not None:
            self._static.close()

    def _is_decode(self, span: TokenRange) -> bool:
        if not self._graphed or span.count != 1:
            return False
        if span.end > self.max_model_len:
            log.debug(TOO_LONG, tokens=span.end, max_model_len=self.max_model_len)
            return False
        return True

    def _graph(self, arity: int) -> GraphedFunction:
        graph = self._graph_by_arity.get(arity)
        if graph is None:
            step = _with_names(self._step, ["input_ids", *(f"value_{number}" for number in range(arity))])
            graph = self._graph_by_arity[arity] = compile_step(step, buckets=self.buckets)
        return graph

    def _step(self, input_ids: Tensor, *values: Tensor) -> Tensor:
        assert self._static is not None
        return self._forward(self._static.metadata(input_ids.shape[0]), input_ids, *values)

    def _decode(self, ranges: list[TokenRange], input_ids: Tensor, values: tuple[Tensor, ...]) -> Tensor:
        assert self._static is not None
        graph, largest = self._graph(len(values)), self.buckets[-1]
        rows = []
        for begin in range(0, len(ranges), largest):
            part = slice(begin, begin + largest)
            self._static.load(ranges[part])
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


def _with_names(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`fn` with parameters of these names, which a graph's error messages give."""

    def named(*args: Any) -> Any:
        return fn(*args)

    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    named.__qualname__ = "StepRunner"
    return named
