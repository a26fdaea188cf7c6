"""Clocks of tests: one that moves only when a test says so, and a loop that leaps over its waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Due:
    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class FakeClock:
    """Seconds that pass on `advance`; due actions run in order, on the test's thread."""

    def __init__(self) -> None:
        self._now = 100.0
        self._due: list[_Due] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay_s: float, action: Callable[[], None]) -> _Due:
        due = _Due(self._now + delay_s, action)
        self._due.append(due)
        return due

    def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while True:
            ready = [d for d in self._due if d.action is not None and d.at <= end]
            if not ready:
                break
            first = min(ready, key=lambda d: d.at)
            self._now = max(self._now, first.at)
            action, first.action = first.action, None
            if action is not None:
                action()
        self._now = end

    @property
    def waiting(self) -> int:
        """Timers that are set and not cancelled."""
        return sum(d.action is not None for d in self._due)


class _Leap(selectors.DefaultSelector):
    """A selector that lets a virtual loop's time pass where it would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:  # another thread has to wake the loop
            return super().select(30)
        self.passed += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock leaps to the next timer instead of waiting for it.

    What another thread does takes no time here: only a loop without a timer waits for it.
    """

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        return 100.0 + self._leap.passed

    def spend(self, seconds: float) -> None:
        """Let time pass as work on the loop's thread does: nothing else runs meanwhile."""
        self._leap.passed += seconds


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop with a virtual clock.

    Raises: what a callback of the loop raised, which asyncio would only log.
    """
    raised: list[BaseException] = []

    def keep(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if "handle" in context and isinstance(context.get("exception"), BaseException):
            raised.append(context["exception"])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(keep)
        result = runner.run(main)
    if raised:
        raise raised[0]
    return result
