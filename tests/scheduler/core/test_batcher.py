"""The batcher's rules without a loop: order, caps, priorities, deadlines, limits, cancellation,
conservation."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from layerzero.scheduler.core.batcher import Batcher, BatchLimits
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.pending_call import (
    CANCELLED,
    DETACHED,
    DONE,
    EXPIRED,
    FAILED,
    PENDING_CALL,
    QUEUED,
    REJECTED,
    RUNNING,
    WAITING,
    Batch,
    Caller,
    Failure,
    PendingCall,
)
from layerzero.scheduler.core.round_robin import BatchQueue, ProgramPoint, RoundRobin
from layerzero.spec.settings import Settings


def call(group: Hashable | None = "g", caller: Caller | None = None, **more: Any) -> PendingCall:
    """One ticket."""
    return PENDING_CALL.cls("op", ("args",), group, caller=caller, **more)


def put(lane: Batcher, *tickets: PendingCall, now: float = 0.0) -> tuple[PendingCall, ...]:
    """Submit tickets."""
    for ticket in tickets:
        lane.submit(ticket, now)
    return tickets


def pick(lane: Batcher, now: float = 0.0) -> list[PendingCall]:
    """Let a turn pass and run the next batch; its tickets."""
    lane.on_turn(now)
    batch = lane.next_batch(now)
    if batch is None:
        return []
    lane.on_batch_done(batch, [None] * len(batch), now)
    return batch.calls


def conserved(lane: Batcher) -> bool:
    """Whether every submitted pending call is accounted for."""
    s = lane.stats
    return (
        s.submitted
        == s.done + s.failed + s.cancelled + s.expired + s.rejected
        + lane.queued + lane.running_calls + len(lane._waiting_for_room)
    )  # fmt: skip


def test_an_idle_lane_gives_one_turn_first() -> None:
    """Nothing runs before a turn has passed since the first pending call, or since a batch ended."""
    lane = Batcher()
    put(lane, call())
    assert lane.next_batch(0.0) is None
    lane.on_turn(0.0)
    batch = lane.next_batch(0.0)
    assert batch is not None
    put(lane, call())
    assert lane.next_batch(0.0) is None, "one batch in flight"
    lane.on_batch_done(batch, [1], 0.0)
    assert lane.next_batch(0.0) is None, "the resumed callers get their turn"
    lane.on_turn(0.0)
    assert lane.next_batch(0.0) is not None


def test_groups_are_served_in_program_order_round_and_round() -> None:
    """The sweep goes on from where it is, not back to the oldest ticket."""
    lane = Batcher()
    first, second, third = Caller(), Caller(), Caller()
    for group in "abc":
        put(lane, call(group, first))
        assert [t.batch_key for t in pick(lane)] == [group]
    put(lane, call("a", second))
    assert [t.batch_key for t in pick(lane)] == ["a"], "after the end comes the start"
    put(lane, call("a", third), call("b", second))
    assert [t.batch_key for t in pick(lane)] == ["b"], "onward, although the other has waited longer"
    put(lane, call("c", second))
    assert [t.batch_key for t in pick(lane)] == ["c"]
    assert [t.batch_key for t in pick(lane)] == ["a"]


@pytest.mark.parametrize("ahead", [1, 7, 15, 29])
def test_callers_that_began_at_different_places_meet(ahead: int) -> None:
    """Two callers of one loop walk together soon, also where both first showed it and took turns."""
    lane, program = Batcher(), [f"op{n}" for n in range(30)]
    at = {Caller(): ahead, Caller(): 0}
    sizes = []
    for _ in range(300):
        for caller in at:
            if caller.point is None or not caller.point.count:
                put(lane, call(program[at[caller]], caller))
        served = pick(lane)
        sizes.append(len(served))
        for ticket in served:
            assert ticket.caller is not None
            at[ticket.caller] = (at[ticket.caller] + 1) % len(program)
    assert sizes[-60:] == [2] * 60


def test_a_place_is_found_between_any_two() -> None:
    """However many slots come to stand behind one, the sweep serves the last to come first."""
    lane = Batcher(BatchLimits(max_program_points=2000))
    first = Caller()
    put(lane, call("first", first))
    pick(lane)
    put(lane, call("last", first))
    pick(lane)
    for number in range(700):  # halving a gap ends after 512
        caller = Caller()
        caller.last_queue, caller.point = (
            lane.round_robin.queues["first"],
            lane.round_robin.queues["first"].points[None],
        )
        put(lane, call(number, caller))
    place = [
        group.points[lane.round_robin.queues["first"]].order
        for key, group in lane.round_robin.queues.items()
        if isinstance(key, int)
    ]
    assert place == sorted(place, reverse=True)
    assert len(set(place)) == 700
    assert [pick(lane)[0].batch_key for _ in range(700)] == list(reversed(range(700)))


def test_all_tickets_of_a_group_join_whatever_their_slot() -> None:
    """Attention of two layers is one batch."""
    lane = Batcher()
    one, two = Caller(), Caller()
    put(lane, call("q0", one), call("q1", two))
    pick(lane)
    pick(lane)
    tickets = put(lane, call("attention", one), call("attention", two))
    assert lane.round_robin.queues["attention"].count == 2
    assert len(lane.round_robin.queues["attention"].points) == 2
    assert set(pick(lane)) == set(tickets)


def test_calls_without_a_group_run_alone() -> None:
    """Three calls that batch with nothing are three batches."""
    lane = Batcher()
    put(lane, call(None), call(None), call(None))
    assert [len(pick(lane)) for _ in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("caps", "sizes"),
    [
        (BatchLimits(max_batch_size=4), [4, 4, 2]),
        (BatchLimits(max_num_batched_tokens=30), [3, 3, 3, 1]),
        (BatchLimits(max_batch_bytes=50), [5, 5]),
        (BatchLimits(max_num_batched_tokens=1, max_batch_bytes=1), [1] * 10),
    ],
)
def test_caps_split_a_batch_in_order(caps: BatchLimits, sizes: list[int]) -> None:
    """Items, tokens and bytes bound a batch; a pending call above the cap runs alone; the order is kept."""
    lane = Batcher(caps)
    tickets = put(lane, *(call(tokens=10, bytes=10) for _ in range(10)))
    batches = [pick(lane) for _ in sizes]
    assert [len(batch) for batch in batches] == sizes
    assert [t for batch in batches for t in batch] == list(tickets)
    assert lane.inflight_batches == lane.unfinished == 0


def test_a_busy_group_does_not_hold_the_sweep() -> None:
    """Tickets that keep coming into the group being served wait a round, the others are reached."""
    lane = Batcher(BatchLimits(max_batch_size=1))
    put(lane, call("a"), call("a"), call("b"))
    served = []
    for _ in range(5):
        served.append(pick(lane)[0].batch_key)
        put(lane, call("a"))
    assert served[:3] == ["a", "a", "b"]


def test_priority_zero_cuts_in_but_never_twice_in_a_row() -> None:
    """An urgent call goes before the sweep; a stream of them leaves every other batch to the sweep."""
    lane = Batcher(BatchLimits(max_batch_size=1))
    put(lane, *(call("slow") for _ in range(3)), *(call("urgent", priority=0) for _ in range(3)))
    served = [pick(lane)[0].batch_key for _ in range(6)]
    assert served == ["urgent", "slow", "urgent", "slow", "urgent", "slow"]


def test_waiting_lifts_a_low_priority() -> None:
    """Inside a group the better class goes first, until the other has waited for its class."""
    lane = Batcher(BatchLimits(max_batch_size=1, priority_aging_s=1.0))
    (low,) = put(lane, call(priority=2), now=0.0)
    (normal,) = put(lane, call(priority=1), now=0.5)
    assert pick(lane, 0.6) == [normal]
    (later,) = put(lane, call(priority=1), now=1.1)
    assert pick(lane, 1.2) == [low], "risen to class 1 and older"
    assert pick(lane, 1.3) == [later]


def test_a_near_deadline_cuts_in() -> None:
    """A pending call whose deadline does not allow a sweep goes first, even behind a full line of its
    group."""
    lane = Batcher(BatchLimits(max_batch_size=2))
    put(lane, *(call("a") for _ in range(6)), *(call("b") for _ in range(6)))
    lane.on_turn(0.0)
    batch = lane.next_batch(0.0)
    assert batch is not None
    lane.on_batch_done(batch, [None, None], 1.0)
    (hurried,) = put(lane, call("b", deadline=3.5), now=1.0)
    assert pick(lane, 1.0)[0] is hurried
    (patient,) = put(lane, call("b", deadline=1e6), now=1.0)
    assert patient not in pick(lane, 1.0)


def test_what_is_too_late_expires_wherever_it_waits() -> None:
    """Expiry reaches queued pending calls and those without room, in time order, and never a running one."""
    lane = Batcher(BatchLimits(max_queue_size=2, max_batch_size=1))
    tickets = put(lane, *(call(deadline=d) for d in (5.0, 1.0, 3.0, 2.0)), call())
    assert [t.state for t in tickets] == [QUEUED, QUEUED, WAITING, WAITING, WAITING]
    assert lane.next_deadline == 1.0
    assert lane.expire(2.5) == [tickets[1], tickets[3]]
    assert [t.state for t in tickets] == [QUEUED, EXPIRED, QUEUED, EXPIRED, WAITING]
    lane.on_turn(2.5)
    batch = lane.next_batch(2.5)
    assert batch is not None
    running = batch.calls[0]
    expired = lane.expire(100.0)
    assert running.state == RUNNING
    assert running not in expired
    assert lane.next_deadline == math.inf
    assert conserved(lane)


def test_deadlines_hold_nothing_that_has_ended() -> None:
    """Many calls with far deadlines leave neither pending calls nor an ever longer heap behind."""
    lane = Batcher()
    for step in range(1000):
        put(lane, call(deadline=1e9 + step))
        pick(lane)
    assert not lane.deadlines.by_seq
    assert len(lane.deadlines) <= 65


def test_a_full_queue_rejects_or_keeps_waiting_in_order() -> None:
    """By items and by bytes; a pending call larger than the whole queue is taken when it is empty."""
    lane = Batcher(BatchLimits(max_queue_size=2, reject_when_full=True))
    tickets = put(lane, call(), call(), call())
    assert [t.state for t in tickets] == [QUEUED, QUEUED, REJECTED]
    assert lane.retry_after_s > 0
    lane = Batcher(BatchLimits(max_queue_bytes=100, max_batch_size=1))
    tickets = put(lane, call(bytes=500), call(bytes=80), call(bytes=80), call(bytes=1))
    assert [t.state for t in tickets] == [QUEUED, WAITING, WAITING, WAITING]
    assert [pick(lane)[0] for _ in range(4)] == list(tickets)
    assert conserved(lane)


def test_cancelling_removes_detaches_or_does_nothing() -> None:
    """A queued pending call is gone with its arguments, a running one keeps them until its batch ends."""
    lane = Batcher(BatchLimits(max_queue_size=2, max_batch_size=1))
    running, queued, waiting = put(lane, call(), call(), call())
    lane.on_turn(0.0)
    batch = lane.next_batch(0.0)
    assert batch is not None and batch.calls == [running]
    assert waiting.state == QUEUED, "room was made"
    assert lane.cancel(queued) and queued.args == () and queued.state == CANCELLED
    assert lane.cancel(running) and running.args == ("args",) and running.state == DETACHED
    assert not lane.cancel(running) and not lane.cancel(queued)
    lane.on_batch_done(batch, ["late"], 0.0)
    assert running.state == CANCELLED and running.args == ()
    assert pick(lane) == [waiting]
    assert (lane.stats.cancelled, lane.stats.detached, lane.stats.done) == (2, 1, 1)
    assert conserved(lane) and lane.inflight_batches == lane.unfinished == 0


def test_room_goes_to_who_waits_longest_however_it_is_made() -> None:
    """A cancelled or expired pending call lets the next one in, also when the one in front of it has gone."""
    lane = Batcher(BatchLimits(max_queue_size=1))
    first, second, third, fourth = put(lane, call(), call(), call(deadline=1.0), call())
    assert lane.cancel(first) and second.state == QUEUED and third.state == WAITING
    assert lane.cancel(second) and third.state == QUEUED
    assert lane.expire(2.0) == [third] and fourth.state == QUEUED
    lane = Batcher(BatchLimits(max_queue_bytes=10))
    _, large, small = put(lane, call(bytes=5), call(bytes=20), call(bytes=5))
    assert lane.cancel(large) and small.state == QUEUED


def test_draining_refuses_and_abandoning_ends() -> None:
    """After `drain` new pending calls are rejected; `abandon` fails what has not started."""
    lane = Batcher(BatchLimits(max_queue_size=1))
    queued, waiting = put(lane, call(), call())
    lane.drain()
    (late,) = put(lane, call())
    assert late.state == REJECTED
    assert lane.abandon() == [queued, waiting]
    assert (queued.state, waiting.state) == (FAILED, FAILED)
    assert lane.inflight_batches == lane.unfinished == 0 and conserved(lane)


def test_programs_are_remembered_up_to_a_bound() -> None:
    """Ten thousand groups leave a bounded memory, and the pending call that exceeds it is not lost."""
    lane = Batcher(BatchLimits(max_program_points=100))
    caller = Caller()
    for step in range(10_000):
        (ticket,) = put(lane, call(step, caller))
        assert pick(lane) == [ticket]
    assert lane.round_robin.size <= 100
    assert len(lane.round_robin.queues) <= 101
    put(lane, *(call(("busy", step)) for step in range(300)))
    assert lane.round_robin.size >= 300, "slots with tickets are never forgotten"
    assert sum(len(pick(lane)) for _ in range(300)) == 300


def next_by_search(sweep: RoundRobin, held: set[BatchQueue]) -> tuple[ProgramPoint | None, int]:
    """The slot to serve next as a look at every waiting one finds it, and how many rounds end before it.

    A group to which callers come from several others lets those pass that are still ahead, for one round.
    """

    def lets_pass(slot: ProgramPoint) -> bool:
        queue = slot.queue
        if queue.solo or len(queue.points) < 2 or queue.waits_in not in (None, sweep.rounds):
            return False
        sources = set(queue.points) - {queue} - held
        return any(other.order > slot.order and other.queue in sources for other in sweep.active_points)

    waiting = sorted(
        (slot for slot in sweep.active_points if slot.queue not in held and not lets_pass(slot)),
        key=lambda slot: slot.order,
    )
    ahead = [slot for slot in waiting if slot.order > sweep._reached]
    return next(iter(ahead or waiting), None), int(not ahead and bool(waiting))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("call"), st.integers(0, 5), st.integers(0, 11)),
            st.tuples(st.just("cancel"), st.integers(0, 40), st.just(0)),
            st.tuples(st.just("next"), st.integers(0, 12), st.integers(1, 3)),
        ),
        max_size=80,
    ),
    st.sampled_from([3, 8, 100]),
)
def test_the_sweep_finds_what_a_search_of_all_places_finds(
    steps: list[tuple[str, int, int]], slots: int
) -> None:
    """Whatever came, went, was forgotten or is held back."""
    lane = Batcher(BatchLimits(max_program_points=slots))
    sweep, callers = lane.round_robin, [Caller() for _ in range(6)]
    tickets: list[PendingCall] = []
    for what, number, more in steps:
        if what == "call":
            tickets += put(lane, call(more, callers[number]))
        elif what == "cancel" and tickets:
            lane.cancel(tickets[number % len(tickets)])
        elif what == "next":
            held = {group for group in sweep.all_queues() if group.key in (number, number + more)}
            sweep._remaining = 0  # as where what was reached is served
            expected, ended = next_by_search(sweep, held)
            before = sweep.rounds
            group = sweep.next_queue(held)
            assert group is (None if expected is None else expected.queue)
            assert sweep.rounds == before + ended
            if group is not None:
                assert sweep._current is expected
                taken = lane._take_batch(group, None, 0.0)
                sweep.on_batch_taken(group, len(taken))
                for ticket in taken:
                    ticket.state = RUNNING


def lines_of(work: Callable[[], None]) -> int:
    """How many lines of Python `work` runs in the scheduler."""
    count = 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "scheduler" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("slots", [128, 1 << 20])
def test_a_call_costs_the_same_among_few_places_and_among_many(slots: int) -> None:
    """Rounds of callers of as many kinds, and the cancellation of callers of one kind from as many places."""

    def per_call(places: int) -> float:
        lane = Batcher(BatchLimits(max_program_points=slots))
        callers = [Caller() for _ in range(places)]

        def work() -> None:
            for kind in range(3):
                put(lane, *(call((kind, number), caller) for number, caller in enumerate(callers)))
                while pick(lane):
                    pass
            for ticket in put(lane, *(call("same", caller) for caller in callers)):
                lane.cancel(ticket)

        return lines_of(work) / places

    assert per_call(2000) < 1.5 * per_call(200)


def test_who_waits_for_room_is_found_without_a_search() -> None:
    """A plain dict walks over every key that it has lost: unseen in a count of lines, so it is named here."""
    lane = Batcher(BatchLimits(max_queue_size=1))
    tickets = put(lane, *(call() for _ in range(4)))
    assert isinstance(lane._waiting_for_room, OrderedDict)
    lane.cancel(tickets[2])
    assert [pick(lane)[0] for _ in range(3)] == [tickets[0], tickets[1], tickets[3]]


def test_statistics_count_sizes_and_waits() -> None:
    """The histogram, the mean and the waits are those of what ran."""
    lane = Batcher()
    put(lane, call(), call(), now=0.0)
    put(lane, call(), now=1.0)
    pick(lane, 2.0)
    put(lane, call(), now=2.0)
    pick(lane, 2.5)
    assert lane.stats.sizes == {3: 1, 1: 1}
    assert lane.stats.mean_batch == 2.0
    assert lane.stats.wait_s == 2 + 2 + 1 + 0.5
    assert lane.stats.wait_max_s == 2.0


def test_outcomes_must_match_the_batch() -> None:
    """A driver that brings back fewer outcomes than pending calls is told so."""
    lane = Batcher()
    put(lane, call(), call())
    lane.on_turn(0.0)
    batch = lane.next_batch(0.0)
    assert batch is not None
    with pytest.raises(ValueError, match="outcomes needs 2 entries, got 1"):
        lane.on_batch_done(batch, [None], 0.0)
    with pytest.raises(ValueError, match="submitted once"):
        lane.submit(batch.calls[0], 0.0)
    with pytest.raises(ValueError, match="priority needs"):
        call(priority=3)


HOLD_S = 0.25


class LaneMachine(RuleBasedStateMachine):
    """Any interleaving of events keeps the counts, the caps and the promise of one sweep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.callers = [Caller() for _ in range(4)]
        self.tickets: list[PendingCall] = []
        self.flying: list[Batch] = []

    @initialize(
        items=st.integers(1, 4),
        tokens=st.integers(1, 20),
        queue=st.integers(1, 12),
        reject=st.booleans(),
        slots=st.sampled_from([2, 8, 1000]),
        ahead=st.integers(1, 2),
        early=st.booleans(),
    )
    def open(
        self, items: int, tokens: int, queue: int, reject: bool, slots: int, ahead: int, early: bool
    ) -> None:
        caps = BatchLimits(
            max_batch_size=items,
            max_num_batched_tokens=tokens,
            max_batch_bytes=30,
            max_queue_size=queue,
            max_queue_bytes=60,
            reject_when_full=reject,
            priority_aging_s=0.5,
            max_program_points=slots,
            max_inflight_batches=ahead,
            max_defer_s=HOLD_S,
        )
        self.lane = Batcher(caps)
        if early:  # the device answers before it has run
            self.lane.expected_callers = ExpectedCallers(caps)

    @rule(
        group=st.sampled_from(["a", "b", "c", "d", None]),
        caller=st.integers(0, 3),
        priority=st.integers(0, 2),
        tokens=st.integers(0, 8),
        size=st.integers(0, 40),
        deadline=st.one_of(st.none(), st.floats(-0.1, 3.0)),
        compiled=st.booleans(),
    )
    def submit(
        self,
        group: str | None,
        caller: int,
        priority: int,
        tokens: int,
        size: int,
        deadline: float | None,
        compiled: bool,
    ) -> None:
        until = None if deadline is None else self.now + deadline
        # Both kinds may share a batcher and a batch.
        kind = PENDING_CALL.cls if compiled else PendingCall
        ticket = kind(
            "op", ("x",), group, 1.0, tokens, size, priority, until, caller=self.callers[caller]
        )  # fmt: skip
        accepted = self.lane.submit(ticket, self.now)
        assert accepted is (ticket.state != REJECTED)
        self.tickets.append(ticket)

    @rule(passed=st.floats(0.0, 1.0))
    def turn(self, passed: float) -> None:
        self.now += passed
        self.lane.on_turn(self.now)

    @rule(share=st.floats(0.0, 1.0))
    def ran(self, share: float) -> None:
        if self.lane.expected_callers is not None:
            self.lane.expected_callers.completed(round(share * self.lane.expected_callers.launches), self.now)

    @rule(caller=st.integers(0, 3))
    def gone(self, caller: int) -> None:
        if self.lane.expected_callers is not None:
            end = self.lane.expected_callers.ended if self.now % 2 < 1 else self.lane.expected_callers.forget
            end(self.callers[caller])

    @rule()
    def expire(self) -> None:
        for ticket in self.lane.expire(self.now):
            assert ticket.state == EXPIRED
            assert ticket.deadline is not None and ticket.deadline <= self.now
        assert self.lane.next_deadline > self.now

    @rule()
    def start(self) -> None:
        queued = [t for t in self.tickets if t.state == QUEUED]
        ready = (
            self.lane.queued
            and not self.lane._turn_due
            and len(self.flying) < self.lane.limits.max_inflight_batches
        )
        batch = self.lane.next_batch(self.now)
        if batch is None:
            expected = self.lane.expected_callers
            held = expected is not None and (
                expected.needs_device or self.now < self.lane.deferred_until <= self.now + HOLD_S
            )
            assert not ready or held
            return
        assert len(self.flying) < self.lane.limits.max_inflight_batches
        assert batch.calls and all(t in queued for t in batch.calls)
        assert len({t.batch_key for t in batch.calls}) == 1
        caps = self.lane.limits
        if len(batch) > 1:
            assert batch.calls[0].batch_key is not None
            assert len(batch) <= caps.max_batch_size
            assert sum(t.tokens for t in batch.calls) <= caps.max_num_batched_tokens
            assert sum(t.bytes for t in batch.calls) <= caps.max_batch_bytes
        self.flying.append(batch)

    @precondition(lambda self: self.flying)
    @rule(failing=st.booleans())
    def finish(self, failing: bool) -> None:
        batch = self.flying.pop()
        outcome = Failure(ValueError("no")) if failing else "value"
        self.lane.on_batch_done(batch, [outcome] * len(batch), self.now)
        for ticket in batch.calls:
            assert ticket.state in (DONE, FAILED, CANCELLED)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        could = ticket.state in (WAITING, QUEUED, RUNNING)
        assert self.lane.cancel(ticket) is could

    @precondition(lambda self: not self.flying)
    @rule()
    def sweep_reaches_everything(self) -> None:
        """Whatever is queued now has run after one sweep of the pending slots and its cut-ins."""
        there = [t for t in self.tickets if t.state == QUEUED]
        # Every pending call is served in the sweep's pass over its slot, at worst in a batch of its own, and
        # between any two of these one cut-in may go. Newcomers of a better class pass only until the
        # pending call has aged, which takes two batches here. Each of the five groups may be held once,
        # and a hold may ask for the device first.
        for _ in range(4 * len(there) + 22):
            self.now += self.lane.limits.priority_aging_s
            self.lane.on_turn(self.now)
            batch = self.lane.next_batch(self.now)
            expected = self.lane.expected_callers
            asks = expected is not None and expected.needs_device
            if expected is not None and asks:  # a driver asks the device, whatever else it launches
                expected.completed(expected.launches, self.now)
            if batch is None:
                if asks:
                    continue
                if self.lane.deferred_until < math.inf:
                    continue
                break
            self.lane.on_batch_done(batch, ["value"] * len(batch), self.now)
            if len(self.tickets) < 200:
                self.submit("a", 0, 1, 1, 1, None, True)  # a group that never rests
        assert not [t for t in there if t.state == QUEUED]

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "lane"):
            return
        lane = self.lane
        assert conserved(lane)
        assert lane.queued == sum(t.state == QUEUED for t in self.tickets)
        assert lane.queued_bytes == sum(t.bytes for t in self.tickets if t.state == QUEUED)
        assert lane.running_calls == sum(t.state in (RUNNING, DETACHED) for t in self.tickets)
        assert lane.queued <= lane.limits.max_queue_size
        for waiting in list(lane._waiting_for_room)[:1]:
            full = lane.queued_bytes + waiting.bytes > lane.limits.max_queue_bytes
            assert lane.queued and (full or lane.queued == lane.limits.max_queue_size), (
                "room goes to who waits"
            )
        assert len(lane.round_robin.active_points) <= lane.queued
        assert all(slot.count > 0 for slot in lane.round_robin.active_points)
        assert sum(slot.count for slot in lane.round_robin.active_points) == lane.queued
        for ticket in self.tickets:
            assert (ticket.args == ()) is (ticket.state >= DONE)


TestLaneMachine = LaneMachine.TestCase


def test_the_limits_of_a_lane_are_those_of_the_settings() -> None:
    """Every one of them, by its name: a setting that is not read changes nothing."""
    given = Settings(
        max_batch_size=3,
        max_num_batched_tokens=5,
        max_batch_bytes=7,
        max_queue_size=11,
        max_queue_bytes=13,
        priority_aging_ms=17.0,
        queue_full_policy="reject",
    )
    caps = BatchLimits.from_settings(given)
    assert (caps.max_batch_size, caps.max_num_batched_tokens, caps.max_batch_bytes) == (3, 5, 7)
    assert (caps.max_queue_size, caps.max_queue_bytes) == (11, 13)
    assert (caps.priority_aging_s, caps.reject_when_full) == (pytest.approx(0.017), True)
    assert not BatchLimits.from_settings(Settings()).reject_when_full
