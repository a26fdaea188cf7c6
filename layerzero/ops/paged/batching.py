"""How paged calls of several callers become one launch: queries and block tables are concatenated.

Keys and values stay where they are: callers join only over one and the same pool.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.batching import TokenBatching, concat_rows, split_outputs
from layerzero.ops.host_copies import concat_with_host_copies, host_copy_of
from layerzero.ops.op import Args, LaunchFunction


@dataclass(frozen=True, slots=True)
class PagedBatching(TokenBatching):
    """Calls over one pool, prefill and decode alike.

    The arguments are queries, pools, block_tables, seq_lens, cu_seqlens_q, flags: `tensors` counts the
    queries, `pools` the pools behind them.
    """

    pools: int

    @property
    def table(self) -> int:
        """The position of block_tables; seq_lens and cu_seqlens_q follow it."""
        return self.tensors + self.pools

    @property
    def concat_positions(self) -> Container[int]:
        """The queries, and what says where their keys are; never the pools."""
        return {*range(self.tensors), *range(self.table, self.table + 3)}

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One launch over everybody's queries."""
        if len(calls) == 1:
            return [launch(calls[0])]
        table = self.table
        counts = [args[0].shape[0] for args in calls]
        queries = [concat_rows([args[i] for args in calls]) for i in range(self.tensors)]
        merged = (
            *queries,
            *calls[0][self.tensors : table],
            concat_with_host_copies([args[table] for args in calls], concat_block_tables, "tables"),
            concat_with_host_copies([args[table + 1] for args in calls], concat_index_rows, "lengths"),
            concat_cu_seqlens([args[table + 2] for args in calls], counts, queries[0].device),
            *calls[0][table + 3 :],
        )
        return split_outputs(launch(merged), counts)


def concat_index_rows(pieces: Sequence[Tensor]) -> Tensor:
    """`concat_rows` for index tensors of which some may be int32 and some int64."""
    if all(piece.dtype == pieces[0].dtype for piece in pieces):
        return concat_rows(pieces)
    return torch.cat([piece.long() for piece in pieces])


def concat_block_tables(tables: Sequence[Tensor]) -> Tensor:
    """All rows of tables of any width, filled up with zeros where a length never reaches."""
    width = max(table.shape[1] for table in tables)
    if all(table.shape[1] == width for table in tables):
        return concat_index_rows(tables)
    wide = torch.int64 if any(table.dtype == torch.int64 for table in tables) else torch.int32
    rows = sum(table.shape[0] for table in tables)
    stacked = torch.zeros((rows, width), dtype=wide, device=tables[0].device)
    row = 0
    for table in tables:
        stacked[row : row + table.shape[0], : table.shape[1]] = table
        row += table.shape[0]
    return stacked


def concat_cu_seqlens(
    offsets: Sequence[Tensor | None], counts: Sequence[int], device: torch.device
) -> Tensor | None:
    """The cu_seqlens of all callers' sequences concatenated; None where each has one query a sequence.

    A caller without offsets has one query a sequence; `counts` are the callers' tokens. Int32.
    """
    if all(caller_offsets is None for caller_offsets in offsets):
        return None
    present = [each for each in offsets if each is not None]
    if device.type != "cpu" and all(host_copy_of(each) is not None for each in present):

        def on_host(host_copies: Sequence[Tensor]) -> Tensor:
            copies = iter(host_copies)
            host_offsets = [None if each is None else next(copies) for each in offsets]
            return concat_cu_seqlens(host_offsets, counts, torch.device("cpu"))  # type: ignore[return-value]

        return concat_with_host_copies(
            present, on_host, "offsets", tuple(counts), tuple(each is None for each in offsets)
        )
    if device.type == "cpu":
        values, start = [0], 0
        for each, count in zip(offsets, counts, strict=True):
            ends = range(1, count + 1) if each is None else each.tolist()[1:]
            values.extend([start + end for end in ends])
            start += count
        return torch.tensor(values, dtype=torch.int32, device=device)
    pieces, start = [torch.zeros(1, dtype=torch.int32, device=device)], 0
    for each, count in zip(offsets, counts, strict=True):
        later = torch.arange(1, count + 1, device=device) if each is None else each[1:]
        pieces.append((later + start).to(torch.int32))
        start += count
    return torch.cat(pieces)
