"""Single flight: however many callers ask for one key at once, it is computed once.

The computation belongs to what runs it (`start`, usually a worker's `submit`), never to the first caller:
a caller that is cancelled or times out leaves, and the others get the result all the same. An error reaches
every caller of its flight and is not kept: the next call computes anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from layerzero._util.fork_safety import renew_after_fork
from layerzero.spec.errors import SelectionTimeoutError

T = TypeVar("T")
Callback = Callable[[], None]


class Flight(Generic[T]):
    """One computation on its way; waiters are called back once, on the thread that computed.

    `claims` counts who was given the flight and has not left: `wait`, or `add` and then `leave`, gives one
    claim back.
    """

    def __init__(self, owner: SingleFlight[T], key: Hashable, compute: Callable[[], T]) -> None:
        self.key = key
        self.ended = False
        self.claims = 0
        self._owner = owner
        self._compute: Callable[[], T] | None = compute
        self._lock = owner.lock
        self._started = False
        self._waiters: list[Callback] = []
        self._error: BaseException | None = None
        self._value: T

    def add(self, on_done: Callback) -> None:
        """Call `on_done()` once it has landed; at once if it has."""
        with self._lock:
            if not self.ended:
                self._waiters.append(on_done)
                return
        on_done()

    def leave(self, on_done: Callback) -> None:
        """Give a claim back, landed or not. The last to leave takes back what has not started."""
        with self._lock:
            self.claims -= 1
            if on_done in self._waiters:
                self._waiters.remove(on_done)
            if not self.claims and not self._started and not self.ended:
                self._owner.forget(self)
                self._compute = None

    def result(self) -> T:
        """The value, or its error raised; only after it has landed."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until it has landed; its value.

        Raises: SelectionTimeoutError: `timeout_s` passed first; the flight continues for the others.
        """
        done = threading.Event()
        on_done = done.set
        self.add(on_done)
        try:
            if not done.wait(timeout_s):
                raise SelectionTimeoutError(f"{self.key!r} took longer than {timeout_s} s")
        finally:
            self.leave(on_done)
        return self.result()

    def run(self) -> None:
        """Compute and land; for the one who was given the flight by `start`."""
        with self._lock:
            compute = self._compute
            self._started = True
        if compute is None:
            return  # taken back before it started
        try:
            self._value = compute()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Land with `error`: what should have run it could not take it."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self.ended = True
            self._compute = None
            self._owner.forget(self)
            waiters, self._waiters = self._waiters, []
        for on_done in waiters:
            on_done()


class SingleFlight(Generic[T]):
    """Flights by key; `start(flight.run)` must run it somewhere, soon, exactly once."""

    __slots__ = ("__weakref__", "_flights", "_start", "lock")

    def __init__(self, start: Callable[[Callable[[], None]], object]) -> None:
        self._start = start
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: nothing is on its way, its thread is not there."""
        self._flights: dict[Hashable, Flight[T]] = {}
        # Reentrant: a collection inside a locked section may end a waiter, and that waiter leaves.
        self.lock = threading.RLock()

    def flight(self, key: Hashable, compute: Callable[[], T]) -> Flight[T]:
        """The flight of `key`: the one on its way, or a new one that computes `compute()`."""
        with self.lock:
            flight = self._flights.get(key)
            if flight is not None:
                flight.claims += 1
                return flight
            flight = self._flights[key] = Flight(self, key, compute)
            flight.claims = 1
        try:
            self._start(flight.run)
        except BaseException as error:
            flight.fail(error)
            raise
        return flight

    def forget(self, flight: Flight[T]) -> None:
        with self.lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]

    def __len__(self) -> int:
        return len(self._flights)
