"""How rows of several callers are sampled or verified in one launch, each with the numbers of its caller."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerzero.ops.batching import TokenBatching, concat_rows, split_outputs
from layerzero.ops.op import Args, LaunchFunction
from layerzero.ops.sampling.draw import as_signed_int64, column, row_seeds


@dataclass(frozen=True, slots=True)
class SamplingBatching(TokenBatching):
    """Rows of any callers over one vocabulary: where callers differ, their numbers become (B,) tensors.

    The first `tensors` arguments have a row a caller's row; `numbers` are the positions of the numbers, of
    which `fractions` are no integers. `seed` is the position of the seeds, which always become tensors: a row
    keeps the stream it has alone.
    """

    tensors: int = 1
    numbers: tuple[int, ...] = ()
    seed: int = 0
    fractions: frozenset[int] = frozenset()

    rowwise: ClassVar[bool] = True  # rows do not touch each other

    @property
    def concat_positions(self) -> Container[int]:
        """The tensors and the numbers; never a draft's tree."""
        return {*range(self.tensors), *self.numbers}

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One launch over everybody's rows."""
        if len(calls) == 1:
            return [launch(calls[0])]
        merged = list(calls[0])
        for position in range(self.tensors):
            merged[position] = concat_rows([args[position] for args in calls])
        rows = [args[0] for args in calls]
        for position in self.numbers:
            merged[position] = concat_numbers(
                [args[position] for args in calls],
                rows,
                seeds=position == self.seed,
                whole=position not in self.fractions,
            )
        return split_outputs(launch(tuple(merged)), [len(each) for each in rows])


def concat_numbers(values: Sequence[Any], rows: Sequence[Tensor], *, seeds: bool, whole: bool) -> Any:
    """One argument of several callers for all their `rows`: a number that all share, else a (B,) tensor.

    `seeds` always become a tensor, so that a row keeps the stream it has alone; `whole` numbers are integers.
    """
    counts = [caller_rows.shape[0] for caller_rows in rows]
    numbers = not any(isinstance(value, Tensor) for value in values)
    device = rows[0].device
    if seeds:
        if not numbers or max(counts) > 1:
            return torch.cat([row_seeds(seed, each) for seed, each in zip(values, rows, strict=True)])
        # A row by itself has the stream of its seed.
        return torch.tensor([as_signed_int64(seed) for seed in values], device=device)
    if numbers and all(value == values[0] for value in values):
        return values[0]
    dtype = torch.int64 if whole else torch.float64
    if not numbers:
        columns = [column(v, dtype, device).expand(n, 1) for v, n in zip(values, counts, strict=True)]
        return torch.cat(columns).squeeze(-1)
    spread = [as_signed_int64(v) for v, n in zip(values, counts, strict=True) for _ in range(n)]
    return torch.tensor(spread, dtype=dtype, device=device)
