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
from layerzero.backends.flashinfer.planning import Pages, int32
from layerzero.ops import host_copies as mirrors

# Reading this much less pays for a second launch and a merge, some 60 us of the host's: at 124 MiB it took
# twice the time, at 1 GB it was ahead by a sixth (`benchmarks/results/prefix_h200.json`).
WORTH_BYTES = 512 << 20
Result = Tensor | tuple[Tensor, Tensor]
_LN2 = 0.6931471805599453


def shared_pages(tables: Tensor, lengths: Tensor, starts: Tensor, size: int) -> int:
    """How many pages from the front all sequences of a batch have in common, on the CPU.

    Each sequence keeps at least as many keys of its own as it has queries, so that causality never reaches
    into what is shared. tables (B, M), lengths (B,), starts (B + 1,) of queries.
    """
    if tables.shape[0] < 2 or tables.shape[1] == 0:
        return 0
    most = int(((lengths - starts.diff()).clamp(min=0) // size).min())
    if int(starts.diff().min()) == 0:  # a sequence without queries has no part in it
        return 0
    same = (tables[:, :most] == tables[:1, :most]).all(0)
    return int(same.long().cumprod(0).sum())


def saved_bytes(pages: int, batch: int, page_bytes: int) -> int:
    """What need not be read: the shared pages of all sequences but one."""
    return pages * (batch - 1) * page_bytes


def pages_behind(tables: Tensor, lengths: Tensor, size: int, shared: int) -> Pages:
    """The pages of each sequence behind the first `shared`, in compressed rows."""
    return Pages.of(tables[:, shared:], lengths - shared * size, size)


@dataclass(slots=True)
class Layered:
    """A paged wrapper, and a second one over the shared pages while a plan has some.

    `plan` and `run` are those of the library's wrapper, called with the op's own tables and lengths.
    """

    make: Callable[[], Any]
    own: Any = None
    above: Any = None
    shared: int = field(default=0)

    def plan(
        self, tables: Tensor, lengths: Tensor, starts: Tensor, size: int, page_bytes: int,
        named: dict[str, Any], sizes: tuple[int, int, int],
    ) -> None:  # fmt: skip
        """Plan for a batch: one wrapper, or two where its sequences share enough.

        `sizes` are query heads, key heads and the head size; `named` the library's keyword arguments.
        """
        self.own = self.own or self.make()
        known, host = mirrors.mirror(tables), int32(mirrors.host(lengths))
        self.shared = 0
        if known is not None or tables.device.type == "cpu":
            found = shared_pages(mirrors.host(tables), host, starts, size)
            if saved_bytes(found, tables.shape[0], page_bytes) >= WORTH_BYTES:
                self.shared = found
        pages = pages_behind(tables, host, size, self.shared) if self.shared else Pages.of(tables, host, size)
        heads = (*sizes, size)
        self.own.plan(starts, pages.starts, pages.ids, pages.last, *heads, seq_lens=pages.lengths, **named)
        if not self.shared:
            return
        self.above = self.above or self.make()
        whole = torch.tensor([0, int(starts[-1])], dtype=torch.int32, device="cpu")
        bounds = torch.tensor([0, self.shared], dtype=torch.int32, device="cpu")
        full = torch.tensor([size], dtype=torch.int32, device="cpu")
        count = torch.tensor([self.shared * size], dtype=torch.int32, device="cpu")
        ids = tables[0, : self.shared].to(torch.int32).contiguous()
        self.above.plan(whole, bounds, ids, full, *heads, seq_lens=count, **{**named, "causal": False})

    def run(
        self, q: Tensor, pools: tuple[Tensor, Tensor], return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of a batch; the log-sum-exp is natural, (T, H)."""
        if not self.shared:
            if return_lse:
                return self.own.run(q, pools, return_lse=True, lse_base="ln")  # type: ignore[no-any-return]
            return self.own.run(q, pools)  # type: ignore[no-any-return]
        out, lse = self.own.run(q, pools, return_lse=True)
        shared, weight = self.above.run(q, pools, return_lse=True)
        module("flashinfer.cascade").merge_state_in_place(out, lse, shared, weight)
        return (out, lse * _LN2) if return_lse else out
