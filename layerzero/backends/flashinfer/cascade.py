"""Sequences of a batch that begin with the same pages: what is shared is read once, not once a sequence.

The shared pages are attended to as one sequence by all queries, the rest by each sequence's own, and the two
partial results are merged by their log-sum-exps. Whether it pays is decided where lengths and tables are
known on the host, as a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.common import module
from layerzero.backends.flashinfer.planning import CompressedBlockTables
from layerzero.ops import host_copies
from layerzero.ops.attention.adapters import Result, int32
from layerzero.ops.attention.lse import from_base_2

# Reading this much less pays for a second launch and a merge, some 60 us of the host's: at 124 MiB it took
# twice the time, at 1 GB it was ahead by a sixth (`benchmarks/results/prefix_h200.json`).
WORTH_BYTES = 512 << 20


def shared_pages(tables: Tensor, lengths: Tensor, starts: Tensor, size: int) -> int:
    """How many first pages all sequences of a batch have in common, on the CPU.

    Each sequence keeps at least as many keys of its own as it has queries, so that causality never reaches
    into what is shared. tables (B, M), lengths (B,), starts (B + 1,) of queries.
    """
    if tables.shape[0] < 2 or tables.shape[1] == 0:
        return 0
    max_shared = int(((lengths - starts.diff()).clamp(min=0) // size).min())
    if int(starts.diff().min()) == 0:  # a sequence without queries has no part in it
        return 0
    same = (tables[:, :max_shared] == tables[:1, :max_shared]).all(0)
    return int(same.long().cumprod(0).sum())


def saved_bytes(pages: int, batch: int, page_bytes: int) -> int:
    """What need not be read: the shared pages of all sequences but one."""
    return pages * (batch - 1) * page_bytes


@dataclass(slots=True)
class CascadeWrapper:
    """A paged wrapper, and a second one over the shared pages while a plan has some.

    `plan` and `run` are those of the library's wrapper, called with the op's own tables and lengths.
    """

    make: Callable[[], Any]
    suffix: Any = None
    prefix: Any = None
    num_shared_pages: int = field(default=0)

    def plan(
        self, tables: Tensor, lengths: Tensor, starts: Tensor, size: int, page_bytes: int,
        named: dict[str, Any], sizes: tuple[int, int, int],
    ) -> None:  # fmt: skip
        """Plan for a batch: one wrapper, or two where its sequences share enough.

        `sizes` are query heads, key heads and the head size; `named` the library's keyword arguments.
        """
        self.suffix = self.suffix or self.make()
        host_copy, host_lengths = host_copies.host_copy_of(tables), int32(host_copies.to_host_values(lengths))
        self.num_shared_pages = 0
        if host_copy is not None or tables.device.type == "cpu":
            num_common = shared_pages(host_copies.to_host_values(tables), host_lengths, starts, size)
            if saved_bytes(num_common, tables.shape[0], page_bytes) >= WORTH_BYTES:
                self.num_shared_pages = num_common
        behind = host_lengths - self.num_shared_pages * size
        pages = CompressedBlockTables.of(tables[:, self.num_shared_pages :], behind, size)
        heads = (*sizes, size)
        self.suffix.plan(starts, pages.starts, pages.ids, pages.last, *heads, seq_lens=pages.lengths, **named)
        if not self.num_shared_pages:
            return
        self.prefix = self.prefix or self.make()
        whole = torch.tensor([0, int(starts[-1])], dtype=torch.int32, device="cpu")
        bounds = torch.tensor([0, self.num_shared_pages], dtype=torch.int32, device="cpu")
        full = torch.tensor([size], dtype=torch.int32, device="cpu")
        count = torch.tensor([self.num_shared_pages * size], dtype=torch.int32, device="cpu")
        ids = tables[0, : self.num_shared_pages].to(torch.int32).contiguous()
        self.prefix.plan(whole, bounds, ids, full, *heads, seq_lens=count, **{**named, "causal": False})

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor], return_lse: bool) -> Result:
        """Attention of a batch; the log-sum-exp is natural, (T, H)."""
        if not self.num_shared_pages:
            if return_lse:
                return self.suffix.run(q, pools, return_lse=True, lse_base="ln")  # type: ignore[no-any-return]
            return self.suffix.run(q, pools)  # type: ignore[no-any-return]
        out, lse = self.suffix.run(q, pools, return_lse=True)
        shared, weight = self.prefix.run(q, pools, return_lse=True)
        module("flashinfer.cascade").merge_state_in_place(out, lse, shared, weight)
        return (out, from_base_2(lse)) if return_lse else out
