"""The circuit breaker of one kernel: a state machine without I/O that reads only the clock it is given."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from layerzero._util.fork_safety import renew_after_fork
from layerzero.spec.settings import Settings

MAX_WHY = 500


class BreakerState(StrEnum):
    """The state of a kernel's breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    QUARANTINED = "quarantined"


class Transition(msgspec.Struct, frozen=True):
    """One change of a breaker's state, and why."""

    kernel: str
    before: BreakerState
    after: BreakerState
    why: str
    time_s: float


class BreakerStatus(msgspec.Struct, frozen=True):
    """What a breaker knows, as values: for reports."""

    kernel: str
    state: BreakerState
    recent_failures: int
    failures: int
    successes: int
    opened: int
    next_probe_at: float | None
    why: str


class Probe:
    """Permission for one call of a kernel on probation; settle it once, whatever happens to the call.

    As a context manager: no error is a success, an `Exception` a failure, anything else (cancellation, exit)
    gives the place back without a verdict. Settling again, or after the round is over, changes nothing.
    """

    __slots__ = ("_breaker", "number")

    def __init__(self, breaker: Breaker, number: int) -> None:
        self._breaker = breaker
        self.number = number

    def succeed(self) -> Transition | None:
        """The kernel works: close the breaker."""
        return self._breaker._end_probe(self.number, True, "a probe succeeded")

    def fail(self, why: str) -> Transition | None:
        """The kernel still fails: open the breaker again, for longer."""
        return self._breaker._end_probe(self.number, False, why)

    def release(self) -> None:
        """Give the place back; the call said nothing about the kernel."""
        self._breaker._end_probe(self.number, None, "")

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.succeed()
        elif isinstance(error, Exception):
            self.fail(f"{type(error).__name__}: {error}")
        else:
            self.release()


@dataclass(eq=False)
class Breaker:
    """The state machine of one kernel; safe from any thread, and it reads no clock but the one given.

    In CLOSED, `failure` and `success` of ordinary calls count, and a success forgets earlier failures. In
    every other state only probes decide: a call that began before the breaker opened says nothing about now.
    `state` is that of the last event, `tick` moves it with time; `next_probe_at` is when an open one begins
    probation, or None.
    """

    _settings: Settings
    _clock: Callable[[], float] = time.monotonic
    kernel: str = ""
    changed: Callable[[Transition], None] | None = None

    def __post_init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._recent: deque[float] = deque()  # it opens at failures_to_open, so it holds no more
        self._why = ""
        self._rounds = 0
        self._opened = 0
        self._failures = 0
        self._successes = 0
        self.next_probe_at: float | None = None
        self._probes: dict[int, float] = {}
        self._issued = 0
        self._lock = threading.Lock()
        renew_after_fork(self)

    def set_settings(self, settings: Settings) -> None:
        """Judge later events by other limits; the present state stays."""
        with self._lock:
            self._settings = settings

    def failure(self, now_s: float, why: str) -> Transition | None:
        """An ordinary call failed at `now`."""
        with self._lock:
            self._failures += 1
            if self.state is not BreakerState.CLOSED:
                return None
            self._why = why[:MAX_WHY]
            self._forget_before(now_s - self._settings.window_s)
            self._recent.append(now_s)
            if len(self._recent) < self._settings.failures_to_open:
                return None
            transition = self._open(now_s, why)
        return self._notify(transition)

    def rest(self, now_s: float, why: str) -> Transition | None:
        """Open at once, whatever was counted: what it runs in is gone. One that is out stays so."""
        with self._lock:
            if self.state is not BreakerState.CLOSED:
                return None
            self._failures += 1
            transition = self._open(now_s, why)
        return self._notify(transition)

    def success(self, now_s: float) -> None:
        """An ordinary call succeeded at `now`."""
        with self._lock:
            self._successes += 1
            if self.state is BreakerState.CLOSED:
                self._recent.clear()

    def tick(self, now_s: float) -> Transition | None:
        """Let time act: cooldowns end, probes without an outcome count as failures."""
        with self._lock:
            transition = self._advance(now_s)
        return self._notify(transition)

    def take_probe(self, now_s: float | None = None) -> Probe | None:
        """One of the `probes` places of a half-open breaker, or None where none is free."""
        time_s = self._clock() if now_s is None else now_s
        with self._lock:
            transition = self._advance(time_s)
            probe = None
            if self.state is BreakerState.HALF_OPEN and len(self._probes) < self._settings.probes:
                self._issued += 1
                self._probes[self._issued] = time_s
                probe = Probe(self, self._issued)
        self._notify(transition)
        return probe

    def quarantine(self, now_s: float, why: str) -> Transition | None:
        """Take the kernel out of service until `lift`."""
        with self._lock:
            if self.state is BreakerState.QUARANTINED:
                return None
            transition = self._move(BreakerState.QUARANTINED, now_s, why)
            self.next_probe_at = None
        return self._notify(transition)

    def lift(self, now_s: float) -> Transition | None:
        """End a quarantine; in any other state nothing changes."""
        with self._lock:
            if self.state is not BreakerState.QUARANTINED:
                return None
            transition = self._close(now_s, "quarantine lifted")
        return self._notify(transition)

    def status(self, now_s: float) -> BreakerStatus:
        """Everything this breaker knows, as values."""
        with self._lock:
            self._forget_before(now_s - self._settings.window_s)
            return BreakerStatus(
                self.kernel,
                self.state,
                len(self._recent),
                self._failures,
                self._successes,
                self._opened,
                self.next_probe_at,
                self._why,
            )

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held stays held, and its probes never come back."""
        self._lock = threading.Lock()
        self._probes.clear()

    def _end_probe(self, number: int, good: bool | None, why: str) -> Transition | None:
        now_s = self._clock()
        with self._lock:
            if self._probes.pop(number, None) is None or good is None:
                return None
            if good:
                self._successes += 1
                transition = self._close(now_s, why)
            else:
                self._failures += 1
                transition = self._open(now_s, why)
        return self._notify(transition)

    def _advance(self, now_s: float) -> Transition | None:
        due_s = self.next_probe_at
        if self.state is BreakerState.OPEN and due_s is not None and now_s >= due_s:
            transition = self._move(BreakerState.HALF_OPEN, now_s, "cooldown ended")
            self.next_probe_at = None
            return transition
        limit = now_s - self._settings.probe_timeout_s
        if self.state is BreakerState.HALF_OPEN and any(begun <= limit for begun in self._probes.values()):
            self._failures += 1
            return self._open(now_s, f"a probe did not return within {self._settings.probe_timeout_s:g} s")
        return None

    def _open(self, now_s: float, why: str) -> Transition:
        settings = self._settings
        longest = max(settings.cooldown_s, settings.cooldown_max_s)
        cooldown = min(longest, settings.cooldown_s * 2.0 ** min(self._rounds, 60))
        self._rounds += 1
        self._opened += 1
        self.next_probe_at = now_s + cooldown
        return self._move(BreakerState.OPEN, now_s, why)

    def _close(self, now_s: float, why: str) -> Transition:
        self._rounds = 0
        self.next_probe_at = None
        return self._move(BreakerState.CLOSED, now_s, why)

    def _move(self, after: BreakerState, now_s: float, why: str) -> Transition:
        transition = Transition(self.kernel, self.state, after, why[:MAX_WHY], now_s)
        self.state = after
        self._why = transition.why
        self._recent.clear()
        self._probes.clear()
        return transition

    def _forget_before(self, moment: float) -> None:
        while self._recent and self._recent[0] <= moment:
            self._recent.popleft()

    def _notify(self, transition: Transition | None) -> Transition | None:
        if transition is not None and self.changed is not None:
            self.changed(transition)
        return transition
