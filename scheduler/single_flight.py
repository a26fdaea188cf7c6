"""Single flight: however many callers ask for one key at once, it is computed once.

The computation belongs to what runs it (`start`, usually a worker's `submit`), never to the first caller:
a caller that is cancelled or times out leaves, and the others get the result all the same. An error reaches
every caller of its flight and is not kept: the next call computes anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from layerzero._util.fork_safety import renew_after_fork
from layerzero.spec.errors import SelectionTimeoutError

T = TypeVar("T")


class Flight(Generic[T]):
    """One computation on its way, and in `future` what becomes of it.

    `claims` counts who was given the flight and has not left: `wait`, or one `leave`, gives one claim back.
    """

    def __init__(self, owner: SingleFlight[T], key: Hashable, compute: Callable[[], T]) -> None:
        self.key = key
        self.claims = 1
        self.future: Future[T] = Future()
        self._owner = owner
        self._compute = compute

    def leave(self) -> None:
        """Give a claim back, landed or not. The last to leave takes back what has not started."""
        with self._owner.lock:
            self.claims -= 1
            if not self.claims and self.future.cancel():
                self._owner.forget(self)

    def result(self) -> T:
        """The value, or its error raised; only after it has landed."""
        if (error := self.future.exception()) is not None:
            raise error.with_traceback(None)
        return self.future.result()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until it has landed; its value.

        Raises: SelectionTimeoutError: `timeout_s` passed first; the flight continues for the others.
        """
        try:
            self.future.exception(timeout_s)
        except TimeoutError as error:
            raise SelectionTimeoutError(f"{self.key!r} took longer than {timeout_s} s") from error
        finally:
            self.leave()
        return self.result()

    def run(self) -> None:
        """Compute and land; for the one who was given the flight by `start`."""
        if not self.future.set_running_or_notify_cancel():
            return  # taken back before it started
        try:
            value = self._compute()
        except BaseException as error:
            self._owner.forget(self)
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._owner.forget(self)
            self.future.set_result(value)


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
        try:
            self._start(flight.run)
        except BaseException as error:
            self.forget(flight)
            flight.future.set_exception(error)
            raise
        return flight

    def forget(self, flight: Flight[T]) -> None:
        with self.lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]

    def __len__(self) -> int:
        return len(self._flights)
