"""The functions that every rank of a group has, their results, and what a step message brings.

A step that decodes starts from the token of the step before. Sent with the step message, that token would
have to reach rank 0's host first, and the devices would wait for the hosts after every step. So a function
whose results are equal on all ranks says so, each rank keeps its last ones, and the message of the next step
names them by step and rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.group.step_message import MAX_VALUES, aligned_contiguous
from layerzero.calls.batched import Batched
from layerzero.calls.functions import Args
from layerzero.ops.host_copies import host_copy_of, to_host_values
from layerzero.spec.errors import ConsistencyError

WAITS_FOR_DEVICE = "rank_group.waits_for_device"
MAX_KEPT_STEPS = 64  # who continues later than that sends values
Rows = tuple[int, int, int]  # a step's number, the first of its rows, how many


class ReplicatedResults:
    """What the last steps returned that is equal on every rank.

    All ranks keep and drop the same: steps and shapes decide, and both are the same everywhere. The thread
    that takes the steps writes; any thread may ask.
    """

    def __init__(self) -> None:
        self._by_step: dict[int, tuple[Tensor, int]] = {}  # with the version that the rows were kept at
        self._step_by_memory: dict[int, int] = {}

    def keep(self, step: int, result: Tensor) -> None:
        """Keep what step number `step` returned, where it is as small as what a message may bring."""
        if not 0 < result.nbytes <= MAX_VALUES or not result.dim() or not result.is_contiguous():
            return
        self._by_step[step] = result, _version(result)
        self._step_by_memory[_memory(result)] = step
        if len(self._by_step) > MAX_KEPT_STEPS:
            oldest = next(iter(self._by_step))
            dropped, _ = self._by_step.pop(oldest)
            if self._step_by_memory.get(_memory(dropped)) == oldest:
                del self._step_by_memory[_memory(dropped)]

    def find(self, tensor: Tensor) -> Rows | None:
        """Which kept rows `tensor` is; None where it is no such rows, or where they were written since."""
        step = self._step_by_memory.get(_memory(tensor))
        entry = None if step is None else self._by_step.get(step)
        if step is None or entry is None:
            return None
        result, version = entry
        alike = tensor.dtype == result.dtype and tensor.shape[1:] == result.shape[1:]
        if not alike or not tensor.dim() or not tensor.is_contiguous() or _version(tensor) != version:
            return None
        row = result.numel() // result.shape[0]
        first, askew = divmod(int(tensor.storage_offset()) - int(result.storage_offset()), row)
        if askew or first < 0 or first + tensor.shape[0] > result.shape[0]:
            return None
        return step, first, tensor.shape[0]

    def parts(self, column: Tensor, pieces: Sequence[Tensor]) -> list[Any] | Tensor:
        """What a step message brings of `column`, which is made of the callers' `pieces`.

        A list of kept rows and of values in their order; the values alone where no rows are kept. Values
        that no host knows are waited for.
        """
        if not self._by_step:
            rows_of: list[Rows | None] = []
        elif (whole := self.find(column)) is not None:
            return [list(whole)]
        else:
            rows_of = [self.find(piece) for piece in pieces]
        if not any(rows_of):
            return column if column.is_cpu else torch.cat(list(map(_to_host, pieces)))
        parts: list[Any] = []
        for piece, rows in zip(pieces, rows_of, strict=True):
            last = parts[-1] if parts else None
            if rows is None:
                parts.append(_to_host(piece))
            elif isinstance(last, list) and (last[0], last[1] + last[2]) == rows[:2]:
                last[2] += rows[2]
            else:
                parts.append(list(rows))
        return parts

    def join_parts(self, parts: Sequence[Any]) -> Tensor:
        """The column of `parts`, on a follower.

        Raises: ConsistencyError: rank 0 names rows that this rank has not kept.
        """
        pieces = [part if isinstance(part, Tensor) else self._rows(*part) for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _rows(self, step: int, first: int, count: int) -> Tensor:
        entry = self._by_step.get(step)
        if entry is None or first + count > entry[0].shape[0]:
            steps = ", ".join(map(str, self._by_step)) or "none"
            raise ConsistencyError(
                f"rank 0's step needs rows {first} to {first + count} of step {step}, got results of {steps}"
            )
        return entry[0][first : first + count]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int:
    """How often torch has written into it; tensors of inference mode do not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _to_host(piece: Tensor) -> Tensor:
    """The values of `piece`; it is said where the device has to be waited for."""
    if not piece.is_cpu and host_copy_of(piece) is None:
        log.debug(WAITS_FOR_DEVICE, shape=list(piece.shape), why="its rows are on no other rank")
    return to_host_values(piece)


Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GroupFunction:
    """A function that every rank has: `unsent` are its columns that stay on rank 0.

    The results of a `replicated` one are equal on all ranks. `prepare` is `RankHandle.batched`'s.
    """

    name: str
    fn: Function
    wants_counts: bool
    replicated: bool
    unsent: frozenset[int]
    prepare: Callable[[list[int]], None] | None = None

    def __call__(self, columns: Sequence[Any], counts: list[int]) -> Any:
        """Run it. Raises: TypeError: it is replicated and returned no tensor."""
        out = self.fn(*columns, counts=counts) if self.wants_counts else self.fn(*columns)
        if self.replicated and not isinstance(out, Tensor):
            raise TypeError(
                f"{self.name} needs to return a tensor, as it is replicated, got {type(out).__name__}"
            )
        return out

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


def group_function(
    name: str,
    fn: Function,
    replicated: bool,
    unsent: Sequence[str],
    prepare: Callable[[list[int]], None] | None = None,
) -> GroupFunction:
    """`fn` with what its parameters say.

    Raises: ValueError: `unsent` names none of them.
    """
    parameters = list(inspect.signature(fn).parameters)
    columns = [parameter for parameter in parameters if parameter != "counts"]
    if unknown := [parameter for parameter in unsent if parameter not in columns]:
        raise ValueError(f"unsent needs parameters among {', '.join(columns)}, got {', '.join(unknown)}")
    indices = frozenset(map(columns.index, unsent))
    return GroupFunction(name, fn, "counts" in parameters, replicated, indices, prepare)


def aligned_columns(columns: Sequence[Any]) -> list[Any]:
    """`columns` with every tensor as it lies on every rank."""
    return [aligned_contiguous(c) if isinstance(c, Tensor) else c for c in columns]


class CollectiveFunction(Batched[Any]):
    """A function with collectives: however short, it waits for other ranks, never on a loop's thread."""

    calls: Sequence[Args] = ()  # of the batch that runs; there is one at a time
    callers = 0  # who wait for their results

    def run(self, calls: Sequence[Args]) -> list[Any]:
        """Call the function once for the rows of all callers, whose own arguments it finds in `calls`."""
        self.calls = calls
        try:
            return super().run(calls)
        finally:
            self.calls = ()

    def _update_us_per_row(self, us_per_row: float) -> None:
        """Nothing: a step stays off the loop however short it proves."""


def with_fewest_callers(functions: Sequence[CollectiveFunction]) -> CollectiveFunction:
    """The first of those that have fewest."""
    return min(functions, key=lambda function: function.callers)
