"""Time as a parameter: everything that waits or expires takes a Clock, so that tests own it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that will happen once, unless cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds, and one-shot calls after a delay."""

    def now(self) -> float: ...

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer: ...


class MonotonicClock:
    """The machine's monotonic clock; a delayed call runs on a thread that exists only while one is due."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run `action` once after `delay_s` seconds, on a daemon thread."""
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        timer.name = "layerzero-timer"
        timer.start()
        return timer
