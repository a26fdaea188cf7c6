"""The client's side of a request: its number, and what an outcome means to the caller."""

from __future__ import annotations

import asyncio
from typing import Any

from layerzero.actors.rpc.server import Outcome
from layerzero.spec.errors import DeviceLostError


class Numbers:
    """Request numbers of one client: `floor` is below every number that is not settled."""

    def __init__(self) -> None:
        self._next = 0
        self._open: set[int] = set()
        self._late: list[int] = []

    def take(self) -> int:
        """The next number."""
        number = self._next
        self._next = number + 1
        self._open.add(number)
        return number

    def settle(self, number: int) -> None:
        """Say that nothing more is wanted of a number."""
        self._open.discard(number)
        self._late.append(number)

    @property
    def floor(self) -> int:
        """Every number below it is settled."""
        return min(self._open, default=self._next)

    def settled(self, most: int = 256) -> tuple[int, ...]:
        """Settled numbers at or above the floor that were not told yet."""
        floor = self.floor
        told = [number for number in self._late if number >= floor][:most]
        self._late = [number for number in self._late if number >= floor][most:]
        return tuple(told)

    def waits_for(self, number: int) -> bool:
        """Whether a number is outstanding."""
        return number in self._open

    @property
    def open(self) -> int:
        """How many are outstanding."""
        return len(self._open)


def settle(outcome: Outcome, device: str, *, here: bool = False) -> Any:
    """The value of an outcome.

    Raises: the exception that the hosted code raised, with the place noted. DeviceLostError: the device took
        no more calls (retryable) or cut this one off. asyncio.CancelledError: it was cancelled there.
    """
    status = outcome.status
    if status == "done":
        return outcome.value
    if status in ("failed", "lost"):
        error = outcome.value
        if status == "failed" and isinstance(error, DeviceLostError):
            error.context = {**error.context, "hosted_on": device}
        if not here and outcome.detail:
            error.add_note(f"raised on device {device!r}:\n{outcome.detail}")
        raise error
    if status in ("draining", "stale"):
        raise DeviceLostError(
            f"device {device!r} takes no call now ({outcome.detail}); nothing ran, the call may be repeated",
            retryable=True,
        )
    if status == "cut":
        raise DeviceLostError(
            f"device {device!r} was drained and the call did not end in time; it had started", retryable=False
        )
    if status == "cancelled":
        raise asyncio.CancelledError(f"the call was cancelled on device {device!r}")
    raise DeviceLostError(f"device {device!r}: {outcome.detail}", retryable=False)
