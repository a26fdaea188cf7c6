"""The functions that every rank of a group has, and what a step message brings of their columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerzero.actors.group.results import ReplicatedResults
from layerzero.actors.group.step_message import aligned_contiguous
from layerzero.calls.batched import Batched
from layerzero.calls.functions import Args

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GroupFunction:
    """A function that every rank has: `unsent` are its columns that stay on rank 0.

    The results of a `replicated` one are equal on all ranks.
    """

    name: str
    fn: Function
    wants_counts: bool
    replicated: bool
    unsent: frozenset[int]

    def __call__(self, columns: Sequence[Any], counts: list[int]) -> Any:
        """Run it.

        Raises: TypeError: it is replicated and returned no tensor.
        """
        out = self.fn(*columns, counts=counts) if self.wants_counts else self.fn(*columns)
        if self.replicated and not isinstance(out, Tensor):
            raise TypeError(
                f"{self.name} needs to return a tensor, as it is replicated, got {type(out).__name__}"
            )
        return out

    def sent_args(self, args: Args) -> Sequence[Any]:
        """What of one caller's arguments a step message brings."""
        return [arg for index, arg in enumerate(args) if index not in self.unsent] if self.unsent else args

    def message_columns(
        self, columns: Sequence[Any], calls: Sequence[Args], results: ReplicatedResults
    ) -> tuple[list[Any], list[int]]:
        """What a step message brings of the columns of `calls`, behind each one's request, and which of them
        as parts of kept rows and of values."""
        sent: list[Any] = []
        in_parts: list[int] = []
        for index, column in enumerate(columns):
            value = None if index in self.unsent else column
            if isinstance(value, Tensor):
                value = results.parts(value, [args[index + 1] for args in calls])
                if isinstance(value, list):
                    in_parts.append(index)
            sent.append(value)
        return sent, in_parts

    def read_columns(
        self, counts: list[int], columns: list[Any], in_parts: list[int], results: ReplicatedResults
    ) -> list[Any]:
        """The columns of a step message on a follower.

        Raises: ConsistencyError: rank 0 names rows that this rank has not kept.
        """
        for index in in_parts:
            columns[index] = results.join_parts(columns[index])
        for index in self.unsent:
            columns[index] = [None] * len(counts)
        return aligned_columns(columns)


def group_function(name: str, fn: Function, replicated: bool, unsent: Sequence[str]) -> GroupFunction:
    """`fn` with what its parameters say.

    Raises: ValueError: `unsent` names none of them.
    """
    parameters = list(inspect.signature(fn).parameters)
    columns = [parameter for parameter in parameters if parameter != "counts"]
    if unknown := [parameter for parameter in unsent if parameter not in columns]:
        raise ValueError(f"unsent needs parameters among {', '.join(columns)}, got {', '.join(unknown)}")
    unsent_columns = frozenset(map(columns.index, unsent))
    return GroupFunction(name, fn, "counts" in parameters, replicated, unsent_columns)


def aligned_columns(columns: Sequence[Any]) -> list[Any]:
    """`columns` with every tensor as it lies on every rank."""
    return [aligned_contiguous(c) if isinstance(c, Tensor) else c for c in columns]


class CollectiveFunction(Batched[Any]):
    """A function with collectives: however short, it waits for other ranks, never on a loop's thread."""

    calls: Sequence[Args] = ()  # of the batch that runs; there is one at a time

    def run(self, calls: Sequence[Args]) -> list[Any]:
        """Call the function once for the rows of all callers, whose own arguments it finds in `calls`."""
        self.calls = calls
        try:
            return super().run(calls)
        finally:
            self.calls = ()

    def _update_us_per_row(self, us_per_row: float) -> None:
        """Nothing: a step stays off the loop however short it proves."""
