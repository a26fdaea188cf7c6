"""The breaker: its states against an independent model, its probes under threads, its guard removed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from layerzero.health import Breaker, BreakerState, Probe, Transition
from tests.health.clocks import SETTINGS, Clock


def state_of(value: Breaker) -> BreakerState:
    """The state, read anew: a checker must not carry over what an earlier assertion said."""
    return value.state


def breaker(clock: Clock, **changes: float) -> Breaker:
    return Breaker(SETTINGS.replace(**changes), clock, kernel="a.b")


def opened(clock: Clock, **changes: float) -> Breaker:
    """A breaker that three failures have just opened."""
    value = breaker(clock, **changes)
    for _ in range(3):
        value.failure(clock.now, "boom")
    assert state_of(value) is BreakerState.OPEN
    return value


def half_open(clock: Clock, **changes: float) -> Breaker:
    """A breaker at the beginning of its first probation."""
    value = opened(clock, **changes)
    clock.now += SETTINGS.cooldown_s
    value.tick(clock.now)
    assert state_of(value) is BreakerState.HALF_OPEN
    return value


def taken(value: Breaker, now: float | None = None) -> Probe:
    """A probe that must be there."""
    probe = value.take_probe(now)
    assert probe is not None
    return probe


def test_a_rest_opens_at_once_and_changes_nothing_that_is_out() -> None:
    """One end of a worker is enough; a kernel on probation or in quarantine stays as it is."""
    clock = Clock()
    value = breaker(clock)
    transition = value.rest(clock.now, "its process ended")
    assert transition is not None and (transition.after, transition.why) == (
        BreakerState.OPEN,
        "its process ended",
    )
    assert value.next_probe_at == clock.now + SETTINGS.cooldown_s
    for other in (half_open(clock), opened(clock)):
        before = state_of(other)
        assert other.rest(clock.now, "again") is None and state_of(other) is before
    kept = breaker(clock)
    kept.quarantine(clock.now, "wrong")
    assert kept.rest(clock.now, "again") is None and state_of(kept) is BreakerState.QUARANTINED


def test_it_opens_at_the_nth_failure_and_says_when_it_probes() -> None:
    """Two failures are forgiven; the third takes the kernel out for the cooldown."""
    clock = Clock()
    value = breaker(clock)
    assert value.failure(100.0, "x") is None and value.failure(101.0, "y") is None
    transition = value.failure(102.0, "out of shared memory")
    assert transition == Transition(
        "a.b", BreakerState.CLOSED, BreakerState.OPEN, "out of shared memory", 102.0
    )
    assert value.next_probe_at == 106.0 and value.take_probe(105.9) is None


@pytest.mark.parametrize(("before", "after"), [(3, 200), (3, 4), (5, 2), (1, 3)])
def test_another_number_of_failures_holds_for_a_breaker_that_exists(before: int, after: int) -> None:
    """It opens at the number in force, not at the one that it was made with."""
    clock = Clock()
    value = breaker(clock, failures_to_open=before)
    value.set_settings(SETTINGS.replace(failures_to_open=after))
    for _ in range(after - 1):
        assert value.failure(clock.now, "boom") is None
    assert value.status(clock.now).recent_failures == after - 1
    assert value.failure(clock.now, "boom") is not None
    assert state_of(value) is BreakerState.OPEN


def test_a_lower_number_of_failures_counts_those_that_were() -> None:
    """Four failures of ten allowed: allowed three, the fifth opens."""
    clock = Clock()
    value = breaker(clock, failures_to_open=10)
    for _ in range(4):
        value.failure(clock.now, "boom")
    value.set_settings(SETTINGS.replace(failures_to_open=3))
    assert value.failure(clock.now, "boom") is not None


def test_failures_outside_the_window_do_not_count() -> None:
    """Three failures open it only within `window_s`."""
    value = breaker(Clock())
    for now in (100.0, 105.0, 110.0):
        value.failure(now, "x")
    assert state_of(value) is BreakerState.CLOSED
    value.failure(114.9, "x")
    assert state_of(value) is BreakerState.OPEN


def test_a_success_forgets_earlier_failures() -> None:
    """Counting starts again after a call that worked."""
    value = breaker(Clock())
    value.failure(100.0, "x")
    value.failure(100.0, "x")
    value.success(100.0)
    assert value.failure(100.0, "x") is None and state_of(value) is BreakerState.CLOSED


def test_it_closes_when_a_probe_succeeds() -> None:
    """After the cooldown one good probe puts the kernel back, with a clean record."""
    clock = Clock()
    value = half_open(clock)
    transition = taken(value).succeed()
    assert transition is not None and transition.after is BreakerState.CLOSED
    assert value.failure(clock.now, "x") is None and value.next_probe_at is None


def test_each_failed_round_doubles_the_cooldown_up_to_the_limit() -> None:
    """4, 8, 16, then 16 seconds; closing starts over at 4."""
    clock = Clock()
    value = opened(clock)
    waits = []
    for _ in range(4):
        assert value.next_probe_at is not None
        waits.append(value.next_probe_at - clock.now)
        clock.now = value.next_probe_at
        taken(value).fail("still")
    assert waits == [4.0, 8.0, 16.0, 16.0]
    assert value.next_probe_at is not None
    clock.now = value.next_probe_at
    taken(value).succeed()
    for _ in range(3):
        value.failure(clock.now, "x")
    assert value.next_probe_at == clock.now + 4.0


def test_a_cooldown_longer_than_its_limit_stays_as_it_is() -> None:
    """`cooldown_s` above `cooldown_max_s` raises the limit."""
    clock = Clock()
    assert opened(clock, cooldown_s=100.0).next_probe_at == clock.now + 100.0


def test_half_open_admits_n_probes_and_no_more() -> None:
    """With two places the third caller gets none until one is settled (I5)."""
    clock = Clock()
    value = half_open(clock)
    first, second = taken(value), taken(value)
    assert value.take_probe() is None
    first.release()
    third = taken(value)
    assert value.take_probe() is None and third.number != second.number


def test_only_the_first_settlement_counts() -> None:
    """A probe settled twice, or after its round, changes nothing."""
    clock = Clock()
    value = half_open(clock)
    good, late = taken(value), taken(value)
    assert late.fail("bad") is not None and state_of(value) is BreakerState.OPEN
    at = value.next_probe_at
    assert good.succeed() is None and late.fail("again") is None and late.succeed() is None
    assert state_of(value) is BreakerState.OPEN and value.next_probe_at == at


def test_calls_from_before_the_opening_say_nothing_about_now() -> None:
    """While open or on probation, ordinary outcomes move neither state nor cooldown."""
    clock = Clock()
    value = opened(clock)
    at = value.next_probe_at
    value.failure(clock.now, "late")
    value.success(clock.now)
    assert state_of(value) is BreakerState.OPEN and value.next_probe_at == at
    clock.now += 4.0
    value.tick(clock.now)
    value.success(clock.now)
    value.failure(clock.now, "late")
    assert value.status(clock.now).state is BreakerState.HALF_OPEN


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, BreakerState.CLOSED),
        (RuntimeError("x"), BreakerState.OPEN),
        (KeyboardInterrupt(), BreakerState.HALF_OPEN),
    ],
)
def test_a_probe_as_context_manager(error: BaseException | None, state: BreakerState) -> None:
    """No error is a success, an error a failure; an interruption gives the place back without a verdict."""
    clock = Clock()
    value = half_open(clock, probes=1)
    if error is None:
        with taken(value):
            assert value.take_probe() is None
    else:
        with pytest.raises(type(error)), taken(value):
            raise error
    assert state_of(value) is state
    assert (value.take_probe() is not None) is (state is BreakerState.HALF_OPEN)


@pytest.mark.asyncio
async def test_a_cancelled_prober_leaks_no_place() -> None:
    """Cancelling the task inside the probed call returns its place at once."""
    clock = Clock()
    value = half_open(clock, probes=1)
    inside = asyncio.Event()

    async def call() -> None:
        with taken(value):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(call())
    await inside.wait()
    assert value.take_probe() is None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state_of(value) is BreakerState.HALF_OPEN and value.take_probe() is not None


def test_a_probe_that_never_returns_counts_as_a_failure() -> None:
    """After `probe_timeout_s` the breaker opens again, and the place is not lost."""
    clock = Clock()
    value = half_open(clock, probes=1)
    taken(value)
    clock.now += 4.9
    assert value.take_probe() is None and state_of(value) is BreakerState.HALF_OPEN
    clock.now += 0.1
    transition = value.tick(clock.now)
    assert (
        transition is not None
        and transition.after is BreakerState.OPEN
        and "did not return" in transition.why
    )
    clock.now += 8.0
    assert value.take_probe() is not None


def test_quarantine_holds_until_lifted() -> None:
    """No time, outcome or probe ends a quarantine; lifting does."""
    clock = Clock()
    value = half_open(clock)
    probe = taken(value)
    assert value.quarantine(clock.now, "wrong numbers") is not None
    assert value.quarantine(clock.now, "again") is None
    assert probe.succeed() is None
    clock.now += 1e6
    assert value.tick(clock.now) is None and value.take_probe() is None
    assert value.failure(clock.now, "x") is None and state_of(value) is BreakerState.QUARANTINED
    assert value.lift(clock.now) is not None and state_of(value) is BreakerState.CLOSED
    assert value.lift(clock.now) is None


def admitted_at_the_edge(value: Breaker, threads: int) -> int:
    """How many of `threads` callers get a probe when all ask at once, as the cooldown ends."""
    start = threading.Barrier(threads)
    probes: list[Probe] = []

    def ask() -> None:
        start.wait()
        probe = value.take_probe()
        if probe is not None:
            probes.append(probe)

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(probes)


class Yielding(dict[int, float]):
    """Places that let every other thread run between being counted and being taken."""

    def __len__(self) -> int:
        count = super().__len__()
        threading.Event().wait(0.001)
        return count


class NoLock:
    """The guard, removed."""

    def __enter__(self) -> None: ...

    def __exit__(self, *details: object) -> None: ...


@pytest.mark.parametrize("places", [1, 2, 5])
def test_fifty_threads_at_the_edge_admit_exactly_n(places: int) -> None:
    """With the lock, 50 callers between open and half-open get N places, however they interleave (I5)."""
    clock = Clock()
    value = opened(clock, probes=places)
    clock.now += SETTINGS.cooldown_s
    value._probes = Yielding()
    assert admitted_at_the_edge(value, 50) == places


def test_without_the_lock_the_same_assertion_fails() -> None:
    """Negative control: the guard removed, the same 50 callers get more than their place."""
    clock = Clock()
    value = opened(clock, probes=1)
    clock.now += SETTINGS.cooldown_s
    value._probes = Yielding()
    value._lock = NoLock()  # type: ignore[assignment]
    assert admitted_at_the_edge(value, 50) > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_can_probe() -> None:
    """A lock and a place held by the parent's threads do not hang or starve the child."""
    clock = Clock()
    value = half_open(clock, probes=1)
    taken(value)
    with value._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if value.take_probe() is not None else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Model:
    """The breaker written a second time, naively: a log of what happened, and rules that reread it."""

    def __init__(self) -> None:
        self.state = "closed"
        self.bad: list[float] = []
        self.reopens = 0
        self.until = 0.0
        self.out: dict[int, float] = {}

    def open(self, now: float) -> None:
        self.state = "open"
        self.until = now + min(16.0, 4.0 * 2**self.reopens)
        self.reopens += 1
        self.bad, self.out = [], {}

    def close(self) -> None:
        self.state, self.reopens, self.bad, self.out = "closed", 0, [], {}

    def time(self, now: float) -> None:
        if self.state == "open" and now >= self.until:
            self.state = "half_open"
        elif self.state == "half_open" and any(now - begun >= 5.0 for begun in self.out.values()):
            self.open(now)

    def failure(self, now: float) -> None:
        if self.state == "closed":
            self.bad.append(now)
            if len([t for t in self.bad if now - t < 10.0]) >= 3:
                self.open(now)

    def settle(self, name: int, good: bool | None, now: float) -> None:
        if self.out.pop(name, None) is not None and good is not None:
            if good:
                self.close()
            else:
                self.open(now)


class BreakerMachine(RuleBasedStateMachine):
    """Random events in random order at random times; breaker and model must never differ."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = breaker(self.clock)
        self.model = Model()
        self.probes: dict[int, Probe] = {}

    @initialize()
    def start(self) -> None:
        assert self.breaker.state is BreakerState.CLOSED

    # Quarter seconds are exact in binary, so that both see the same instant at every edge.
    @rule(quarters=st.integers(0, 80))
    def wait(self, quarters: int) -> None:
        self.clock.now += quarters / 4

    @rule()
    def fail(self) -> None:
        self.breaker.failure(self.clock.now, "x")
        self.model.failure(self.clock.now)

    @rule()
    def succeed(self) -> None:
        self.breaker.success(self.clock.now)
        if self.model.state == "closed":
            self.model.bad = []

    @rule()
    def tick(self) -> None:
        self.breaker.tick(self.clock.now)
        self.model.time(self.clock.now)

    @rule()
    def take(self) -> None:
        probe = self.breaker.take_probe()
        self.model.time(self.clock.now)
        assert (probe is not None) is (self.model.state == "half_open" and len(self.model.out) < 2)
        if probe is not None:
            self.probes[probe.number] = probe
            self.model.out[probe.number] = self.clock.now

    @precondition(lambda self: self.probes)
    @rule(data=st.data(), good=st.sampled_from([True, False, None]), again=st.booleans())
    def settle(self, data: st.DataObject, good: bool | None, again: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.probes)))
        probe = self.probes[name] if again else self.probes.pop(name)
        acts: dict[bool | None, Callable[[], object]] = {
            True: probe.succeed,
            False: lambda: probe.fail("x"),
            None: probe.release,
        }
        acts[good]()
        self.model.settle(name, good, self.clock.now)

    @rule()
    def quarantine_and_lift(self) -> None:
        self.breaker.quarantine(self.clock.now, "x")
        assert self.breaker.take_probe() is None
        self.breaker.lift(self.clock.now)
        self.model.close()

    @invariant()
    def same(self) -> None:
        standing = self.breaker.status(self.clock.now)
        assert standing.state.value == self.model.state
        assert len(self.breaker._probes) == len(self.model.out) <= 2
        assert (standing.next_probe_at == self.model.until) is (standing.state is BreakerState.OPEN)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = profile(max_examples=200, stateful_step_count=50, deadline=None)
