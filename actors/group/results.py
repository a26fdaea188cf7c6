"""Results that every rank of a group has: a later step takes them where they are, not from a message.

A step that decodes starts from the token of the step before. Sent with the step message, that token would
have to reach rank 0's host first, and the devices would wait for the hosts after every step. So a function
whose results are equal on all ranks says so, each rank keeps its last ones, and the message of the next step
names them by step and rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.group.step_message import MAX_VALUES
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
            places: list[Rows | None] = []
        elif (whole := self.find(column)) is not None:
            return [list(whole)]
        else:
            places = [self.find(piece) for piece in pieces]
        if not any(places):
            return column if column.is_cpu else torch.cat(list(map(_to_host, pieces)))
        parts: list[Any] = []
        for piece, rows in zip(pieces, places, strict=True):
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
