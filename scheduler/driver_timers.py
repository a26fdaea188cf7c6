"""A driver's two timers: for the nearest deadline of a call that waits, and for the end of a hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING

from layerzero.spec.errors import DeadlineExceededError

if TYPE_CHECKING:
    from layerzero.scheduler.loop_driver import LoopDriver


class DueTimer:
    """Calls `action` at the time that was set last; one timer of the loop at most."""

    __slots__ = ("_action", "_context", "_handle", "_loop", "at")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, action: Callable[[], object], context: Context
    ) -> None:
        self._loop = loop
        self._action = action
        self._context = context
        self._handle: asyncio.TimerHandle | None = None
        self.at = float("inf")  # infinite where nothing is set

    def set(self, at: float) -> None:
        """Be due at `at`, and no more at any other time."""
        if at == self.at:
            return
        self.cancel()
        self.at = at
        if at < float("inf"):
            self._handle = self._loop.call_at(at, self._on_time, context=self._context)

    def _on_time(self) -> None:
        self._handle = None
        self._action()

    def cancel(self) -> None:
        """Be due no more."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.at = None, float("inf")


class CallDeadlines:
    """Ends calls that have not started by their deadline, with one timer, for the nearest of them."""

    __slots__ = ("_driver", "_due")

    def __init__(self, driver: LoopDriver, context: Context) -> None:
        self._driver = driver
        self._due = DueTimer(driver.loop, driver._runs.whole(self._on_time), context)

    def watch(self) -> None:
        """A call with a deadline has come."""
        nearest_s = self._driver.batcher.next_deadline
        if nearest_s < self._due.at:
            self._due.set(nearest_s)

    def on_turn(self, now_s: float) -> None:
        """End what is due, where a turn comes before the timer."""
        if self._due.at <= now_s:
            self._expire(now_s)

    def _on_time(self) -> None:
        # A loop's timer may fire up to one clock tick early.
        self._expire(max(self._driver.loop.time(), self._due.at))

    def _expire(self, now_s: float) -> None:
        driver = self._driver
        for call in driver.batcher.expire(now_s):
            waited_ms = (now_s - call.submitted_at) * 1e3
            driver.fail(call, DeadlineExceededError(f"not started after {waited_ms:.1f} ms in the queue"))
        self._due.cancel()
        self._due.set(driver.batcher.next_deadline)

    def cancel(self) -> None:
        """Watch no more."""
        self._due.cancel()
