"""The client's side of a request: its number, and what an outcome means to the caller."""

from __future__ import annotations

import asyncio
from typing import Any

from layerzero.actors.rpc.server import CallOutcome
from layerzero.spec.errors import DeviceLostError


class RequestNumbers:
    """Request numbers of one client: `ack_watermark` is below every number that is not settled."""

    def __init__(self) -> None:
        self._next = 0
        self._outstanding: set[int] = set()
        self._unsent_acks: list[int] = []

    def new_number(self) -> int:
        """The next number."""
        number = self._next
        self._next = number + 1
        self._outstanding.add(number)
        return number

    def ack(self, number: int) -> None:
        """Say that nothing more is wanted of a number."""
        self._outstanding.discard(number)
        self._unsent_acks.append(number)

    @property
    def ack_watermark(self) -> int:
        """Every number below it is settled."""
        return min(self._outstanding, default=self._next)

    def take_acks(self, max_count: int = 256) -> tuple[int, ...]:
        """Settled numbers at or above the watermark that were not sent yet."""
        watermark = self.ack_watermark
        acks = [number for number in self._unsent_acks if number >= watermark]
        self._unsent_acks = acks[max_count:]
        return tuple(acks[:max_count])

    def is_outstanding(self, number: int) -> bool:
        """Whether a number is outstanding."""
        return number in self._outstanding

    @property
    def outstanding(self) -> int:
        """How many are outstanding."""
        return len(self._outstanding)


def result_of(outcome: CallOutcome, device: str, *, same_process: bool = False) -> Any:
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
        if not same_process and outcome.detail:
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
