"""ProbeTimer: one timer for the next circuit breaker of a device that will want a probe."""

from __future__ import annotations

import threading

from layerzero._util.clock import Clock, Timer
from layerzero.health import Health


class ProbeTimer:
    """Ticks `health` when a breaker is due; `arm` after every change of health, `stop` for good."""

    def __init__(self, health: Health, clock: Clock) -> None:
        self._health = health
        self._clock = clock
        self._stopped = False
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """A forked child has no timer."""
        self._lock = threading.RLock()  # a breaker that changes while it is ticked arms again
        self._timer: Timer | None = None

    def arm(self) -> None:
        """Wait for the next breaker that is due, and for no other."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            due = self._health.next_change()
            if due is not None and not self._stopped:
                self._timer = self._clock.call_later(max(0.0, due - self._clock.now()), self._tick)

    def _tick(self) -> None:
        self._health.tick()
        self.arm()

    def stop(self) -> None:
        """Cancel the timer; `arm` does nothing from now on."""
        with self._lock:
            self._stopped = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
