"""OutputChecks: now and then the next run of every plan is compared with what its op's outputs are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from layerzero._util.clock import Clock, Timer
from layerzero.selection.dispatch import DispatchState


class OutputChecks:
    """Every `period_s` seconds each plan of `states()` is checked at its next run; other hits pay nothing."""

    def __init__(self, states: Callable[[], Iterable[DispatchState]], clock: Clock) -> None:
        self._states = states
        self._clock = clock
        self._period_s = 0.0
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """A forked child has no timer; it begins one of its own."""
        self._lock = threading.RLock()
        self._timer: Timer | None = None
        self.start(self._period_s)

    def start(self, period_s: float) -> None:
        """Check so often from now on; 0 never."""
        with self._lock:
            if period_s == self._period_s and self._timer is not None:
                return
            self.stop()
            self._period_s = period_s
            if period_s > 0:
                self._timer = self._clock.call_later(period_s, self._tick)

    def _tick(self) -> None:
        for state in self._states():
            for table in list(state.tables.values()):
                table.check_outputs_again()
        with self._lock:
            if self._timer is not None:
                self._timer = self._clock.call_later(self._period_s, self._tick)

    def stop(self) -> None:
        """Check no more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
