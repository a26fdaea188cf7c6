"""ClockTimer: one timer for what has to happen at times that change, such as the next probe of a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable

from layerzero._util.clock import Clock, Timer


class ClockTimer:
    """Calls `act()` at the clock's time `due_at()`, again and again; never where that is None."""

    __slots__ = ("_act", "_clock", "_due_at", "_lock", "_stopped", "_timer")

    def __init__(self, clock: Clock, due_at: Callable[[], float | None], act: Callable[[], object]) -> None:
        self._clock = clock
        self._due_at = due_at
        self._act = act
        self._stopped = False
        self._lock = threading.RLock()  # what is due may be asked of something that arms again
        self._timer: Timer | None = None

    def reset_after_fork(self) -> None:
        """In a forked child: the parent's timer is not there, and what is due is waited for by another."""
        self._lock, self._timer = threading.RLock(), None
        self.arm()

    def arm(self) -> None:
        """Ask when it is due and wait for that, in place of what was waited for before."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            due_at = None if self._stopped else self._due_at()
            if due_at is not None:
                self._timer = self._clock.call_later(max(0.0, due_at - self._clock.now()), self._run)

    def _run(self) -> None:
        self._act()
        self.arm()

    def stop(self) -> None:
        """Cancel the timer; `arm` does nothing from now on."""
        with self._lock:
            self._stopped = True
            self.arm()
