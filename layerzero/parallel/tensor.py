"""The ranks that share the heads, columns and vocabulary of one stage, and the sums between them.

A column-parallel weight has some of the rows of (out, in) and gives some of the columns of the output; a
row-parallel one takes those columns and gives partial sums, which `reduce` adds up. With `sequence` each rank
keeps some of the rows between the two: the norms run on those, and the same bytes travel as one half of the
all-reduce before them and as the other half behind them.

Sources: arXiv 1909.08053, section 3; sequence parallel: arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from layerzero import sync


class TensorGroup:
    """One rank of a tensor-parallel group, `rank` of `ranks`; of one rank it changes nothing.

    `group` is a process group of torch.distributed. The sums have no gradient, and refuse what wants one.
    """

    def __init__(
        self, rank: int = 0, ranks: int = 1, group: dist.ProcessGroup | None = None, *, sequence: bool = False
    ) -> None:
        self.rank, self.ranks, self.group = rank, ranks, group
        self.sequence = sequence and ranks > 1

    def split(self, name: str, size: int) -> int:
        """One rank's share of `size` heads or columns.

        Raises: ValueError: the ranks do not divide it.
        """
        if size % self.ranks:
            raise ValueError(f"ranks needs a divisor of the model's {size} {name}, got {self.ranks}")
        return size // self.ranks

    def share_of_rows(self, rows: int) -> int:
        """How many of `rows` a rank keeps between two products: all without `sequence`, else rounded up."""
        return -(-rows // self.ranks) if self.sequence else rows

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial` (T, ...): all of it, or this rank's rows with `sequence`.

        May write into `partial`. Raises: RuntimeError: it wants a gradient.
        """
        if self.ranks == 1:
            return partial
        _need_no_graph(partial)
        if not self.sequence:
            dist.all_reduce(partial, group=self.group)
            return partial
        padded = self._padded(partial)
        rows = padded.new_empty(len(padded) // self.ranks, *padded.shape[1:])
        dist.reduce_scatter_tensor(rows, padded, group=self.group)
        return rows

    def keep_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of `x` (T, ...), which every rank has; all of them without `sequence`."""
        return self._padded(x).chunk(self.ranks)[self.rank] if self.sequence else x

    def gather_rows(self, x: Tensor, rows: int) -> Tensor:
        """All `rows` rows out of every rank's `x`, as `reduce` and `keep_rows` have left them."""
        if not self.sequence:
            return x
        _need_no_graph(x)
        whole = x.new_empty(len(x) * self.ranks, *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole[:rows]

    def gather_columns(self, part: Tensor) -> Tensor:
        """(T, V) out of every rank's columns `part` (T, V / ranks), as of a vocabulary-parallel head."""
        if self.ranks == 1:
            return part
        _need_no_graph(part)
        parts = part.new_empty(self.ranks * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(parts, part.contiguous(), group=self.group)
        return torch.cat(parts.chunk(self.ranks), -1)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """The rows of a vocabulary-parallel table: `weight` (V / ranks, C) begins with this rank's first id.

        Returns: (T, C), or this rank's rows of it with `sequence`.
        """
        if self.ranks == 1:
            return sync.embedding(ids, weight)
        local = ids - self.rank * len(weight)
        elsewhere = (local < 0) | (local >= len(weight))
        rows = sync.embedding(local.masked_fill(elsewhere, 0), weight)
        return self.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def _padded(self, x: Tensor) -> Tensor:
        """`x` with rows of zeros behind it, so that the ranks divide them."""
        missing = self.share_of_rows(len(x)) * self.ranks - len(x)
        padded = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
        return padded.contiguous()


def _need_no_graph(tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "a sum over ranks needs tensors without a gradient, got one that wants it: these sums are for "
            "inference, under torch.no_grad() or Settings(inference=True)"
        )
