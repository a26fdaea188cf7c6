"""A clock that moves only when a test says so."""

from __future__ import annotations

from collections.abc import Callable


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
