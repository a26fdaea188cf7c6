"""Every reason that a batcher has for launching a batch now, from the history that leads to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from layerzero.scheduler.core import launch_reasons as reasons
from layerzero.scheduler.core.batcher import Batcher, BatcherStats, BatchLimits
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.pending_call import Batch, Caller, PendingCall
from tests.scheduler.core.test_batcher import call, put

PASS_S = 0.010


def batcher(device: bool = False, **limits: Any) -> Batcher:
    """A batcher of a `device` that answers before it has run, or of a worker."""
    made = Batcher(BatchLimits(**limits))
    if device:
        made.expected_callers = ExpectedCallers(made.limits)
    return made


def launch(lane: Batcher, now_s: float) -> Batch | None:
    """The next batch, launched at once."""
    lane.on_turn(now_s)
    batch = lane.next_batch(now_s)
    if batch is not None:
        lane.on_batch_done(batch, [None] * len(batch), now_s)
    return batch


def whys(lane: Batcher, now_s: float) -> Iterator[str]:
    """The reasons of all batches that run now."""
    while (batch := launch(lane, now_s)) is not None:
        yield batch.why


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([{}, {}], [reasons.TURN]),
        ([{"group": None}, {"group": None}], [reasons.ALONE, reasons.ALONE]),
        ([{}, {}, {}], [reasons.LIMIT, reasons.TURN]),
        ([{}, {"group": "h", "priority": 0}], [reasons.PRIORITY, reasons.TURN]),
        ([{}, {"group": "h", "deadline": 1e-4, "expected_us": 1e3}], [reasons.DEADLINE, reasons.TURN]),
    ],
    ids=["turn", "alone", "limit", "priority", "deadline"],
)
def test_a_workers_batches_say_why(calls: list[dict[str, object]], told: list[str]) -> None:
    """On a device that runs one batch at a time the sweep decides, or what overtakes it."""
    lane = batcher(max_batch_size=2)
    put(lane, *(call(**facts) for facts in calls))  # type: ignore[arg-type]
    assert list(whys(lane, 0.0)) == told
    assert lane.stats.reasons == Counter(told) and sum(lane.stats.reasons.values()) == lane.stats.batches


def crowd(lane: Batcher, callers: list[Caller], now_s: float, group: str = "step") -> list[PendingCall]:
    return list(put(lane, *(call(group, caller) for caller in callers), now=now_s))


def test_a_devices_batches_say_why() -> None:
    """Everybody has called, a batch is full, a grace is over, or who is away calls elsewhere next."""
    lane = batcher(device=True, max_batch_size=3)
    expected = lane.expected_callers
    assert expected is not None
    callers = [Caller() for _ in range(3)]
    now_s = 0.0
    for _ in range(4):  # a program of one step, its period learned
        crowd(lane, callers[:2], now_s)
        assert list(whys(lane, now_s)) == [reasons.ALL_HERE]
        now_s += PASS_S
        expected.completed(expected.launches, now_s)
    crowd(lane, callers[:1], now_s)  # the other is away: held, then not
    assert list(whys(lane, now_s)) == []
    assert list(whys(lane, now_s + PASS_S)) == [reasons.GRACE_OVER]
    assert lane.stats.reasons == {reasons.ALL_HERE: 4, reasons.GRACE_OVER: 1}
    assert lane.stats.holds == {reasons.CALLERS_READ: 1}
    assert lane.stats.held_s == {reasons.CALLERS_READ: pytest.approx(PASS_S)}


def test_a_full_batch_waits_for_nobody() -> None:
    """It says so, although a caller is away."""
    lane = batcher(device=True, max_batch_size=2)
    callers = [Caller() for _ in range(3)]
    crowd(lane, callers, 0.0)
    assert list(whys(lane, 0.0)) == [reasons.LIMIT]  # the third one waits for who may join it
    crowd(lane, callers[:2], 0.001)
    assert list(whys(lane, 0.001)) == [reasons.LIMIT]


def test_a_group_that_nobody_is_expected_at_says_so() -> None:
    """Who is away has never gone from where it is to this group."""
    lane = batcher(device=True)
    first, second = Caller(), Caller()
    crowd(lane, [first], 0.0, "a")
    assert list(whys(lane, 0.0)) == [reasons.ALL_HERE]
    crowd(lane, [second], 0.001, "b")
    assert list(whys(lane, 0.001)) == [reasons.NOBODY_EXPECTED]


def test_a_hold_behind_a_running_batch_is_counted_once_and_to_its_launch() -> None:
    """Three turns look at it while the device runs; then the caller that was away is there."""
    lane = batcher(device=True)
    here, away = Caller(), Caller()
    crowd(lane, [here, away], 0.0)
    assert list(whys(lane, 0.0)) == [reasons.ALL_HERE]
    crowd(lane, [here], 0.001)
    for turn in range(3):
        assert list(whys(lane, 0.001 + turn * 0.002)) == []
    assert lane.stats.holds == {}
    crowd(lane, [away], 0.008)
    assert list(whys(lane, 0.008)) == [reasons.ALL_HERE]
    assert lane.stats.holds == {reasons.DEVICE_RUNS: 1}
    assert lane.stats.held_s == {reasons.DEVICE_RUNS: pytest.approx(0.007)}


def test_a_hold_that_lost_its_calls_is_forgotten() -> None:
    """Who takes its call back ends the hold; the next one begins anew."""
    lane = batcher(device=True)
    here, away = Caller(), Caller()
    crowd(lane, [here, away], 0.0)
    assert list(whys(lane, 0.0)) == [reasons.ALL_HERE]
    (waiting,) = crowd(lane, [here], 0.001)
    assert list(whys(lane, 0.001)) == []
    assert lane.cancel(waiting)
    crowd(lane, [here], 0.005)
    assert list(whys(lane, 0.005)) == []
    crowd(lane, [away], 0.006)
    assert list(whys(lane, 0.006)) == [reasons.ALL_HERE]
    assert lane.stats.held_s == {reasons.DEVICE_RUNS: pytest.approx(0.001)}


def test_what_batchers_counted_adds_up() -> None:
    """Of two batchers by kind, and the one that is added is left as it was."""
    total, one = BatcherStats(), BatcherStats()
    one.reasons, one.holds, one.held_s, one.sizes = (
        {"turn": 2},
        {"device_runs": 1},
        {"device_runs": 0.5},
        {3: 2},
    )
    for _ in range(2):
        total.add(one)
    assert (total.reasons, total.holds, total.sizes) == ({"turn": 4}, {"device_runs": 2}, {3: 4})
    assert total.held_s == {"device_runs": 1.0} and one.reasons == {"turn": 2}
