"""PlanExpiry: one timer that has a device's plans made anew when they are as old as its settings allow."""

from __future__ import annotations

import threading
from collections.abc import Callable

from layerzero._util.clock import Clock, Timer


class PlanExpiry:
    """Calls `drop()` every `ttl_s()` seconds; never where that is None."""

    __slots__ = ("_clock", "_drop", "_lock", "_stopped", "_timer", "_ttl_s")

    def __init__(self, clock: Clock, ttl_s: Callable[[], float | None], drop: Callable[[], object]) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._drop = drop
        self._stopped = False
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """A forked child has no timer."""
        self._lock = threading.RLock()
        self._timer: Timer | None = None

    def arm(self) -> None:
        """Count from now, in place of what was counted before."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            ttl_s = self._ttl_s()
            if ttl_s is not None and not self._stopped:
                self._timer = self._clock.call_later(ttl_s, self._expire)

    def _expire(self) -> None:
        self._drop()
        self.arm()

    def stop(self) -> None:
        """Drop nothing more."""
        with self._lock:
            self._stopped = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
