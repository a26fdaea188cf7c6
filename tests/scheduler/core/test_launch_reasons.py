"""Every reason that a batcher has for launching a batch now, from the history that leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layerzero.scheduler.core import launch_reasons as reasons
from layerzero.scheduler.core.batcher import Batcher, BatchLimits
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.pending_call import Batch, Caller, PendingCall
from tests.scheduler.core.test_batcher import call, put

PASS_S = 0.010


def batcher(device: bool = False, **limits: Any) -> Batcher:
    """A batcher that explains; of a `device` that answers before it has run, or of a worker."""
    made = Batcher(BatchLimits(**limits))
    made.explains = True
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


def test_a_full_batch_waits_for_nobody() -> None:
    """It says so, although a caller is away."""
    lane = batcher(device=True, max_batch_size=2)
    callers = [Caller() for _ in range(3)]
    crowd(lane, callers, 0.0)
    assert list(whys(lane, 0.0)) == [reasons.LIMIT, reasons.NOBODY_EXPECTED]
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


def test_who_does_not_ask_is_not_told() -> None:
    """Without a timeline no reason is made."""
    lane = batcher()
    lane.explains = False
    put(lane, call())
    assert list(whys(lane, 0.0)) == [reasons.UNEXPLAINED]
