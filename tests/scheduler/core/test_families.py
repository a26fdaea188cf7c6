"""Groups that differ in their weights alone wait in one queue where few of each meet, in virtual time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.scheduler.core import families
from layerzero.scheduler.core.batcher import Batcher, BatchLimits
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.pending_call import Caller, PendingCall
from tests.scheduler.test_traffic import Machine, Program, experts, own_orders, straight, together


@dataclass(frozen=True)
class Key:
    """A group of the family of all weights of one shape."""

    weight: Hashable
    family: str = "any weight"


def of_one_shape(programs: list[Program]) -> list[Program]:
    """The same programs, all of whose groups are products with weights of one shape."""
    keys: dict[Hashable, Key] = {}
    return [[keys.setdefault(group, Key(group)) for group in program] for program in programs]


@pytest.mark.parametrize("programs", [experts(60), own_orders(60)], ids=["experts", "own orders"])
@pytest.mark.parametrize("at_once", [False, True])
def test_those_of_which_few_meet_wait_together(programs: list[Program], at_once: bool) -> None:
    """Their batches are of more calls than any weight's own are, and all of it takes less time."""
    apart, joined = Machine(at_once=at_once), Machine(at_once=at_once)
    apart_s, joined_s = apart.run(together(programs)), joined.run(together(of_one_shape(programs)))
    assert joined.mean_batch > 1.5 * apart.mean_batch
    assert joined_s < apart_s


@pytest.mark.parametrize("callers", [12, 64])
def test_callers_that_meet_by_themselves_keep_their_queues(callers: int) -> None:
    """All callers of one model are one batch at every weight, and none waits with those of another."""
    machine = Machine()
    machine.run(together(of_one_shape(straight(50)[:callers])))
    assert not any(queue.together for queue in machine.lane.round_robin.all_queues())
    assert machine.mean_batch == callers


def test_a_family_ends_where_its_callers_go_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of their own, then one order for all: each weight has its queue again."""
    monkeypatch.setattr(families, "LIFE", 512)
    same: Program = list(range(8))
    machine = Machine()
    machine.run(together(of_one_shape([own + same * 200 for own in own_orders(40)])))
    queues = machine.lane.round_robin.queues
    led = [queue.key for key, queue in queues.items() if key != queue.key]
    assert not led


def test_one_adapter_a_caller_needs_no_queue() -> None:
    """Where no two callers share a weight a batch of them saves nothing beside calls at once."""
    programs: list[Program] = [[Key(number)] * 400 for number in range(64)]
    machine = Machine(at_once=True)
    machine.run(together(programs))
    assert machine.at_once_calls > 0.9 * 64 * 400


@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), min_size=200, max_size=600),
    st.integers(2, 40),
    st.booleans(),
)
def test_every_call_ends_once_whatever_is_joined_forgotten_and_closed(
    calls: list[tuple[int, int]], remembered: int, closes: bool
) -> None:
    """Calls of callers at several weights, few places remembered: each is answered once or fails."""
    batcher = Batcher(BatchLimits(max_program_points=remembered))
    callers = [Caller() for _ in range(12)]
    ended: list[PendingCall] = []
    made = []
    for step, (number, weight) in enumerate(calls):
        made.append(PendingCall("op", (), Key(weight), caller=callers[number]))
        batcher.submit(made[-1], 0.0)
        if step % 5 == 4:
            batcher.on_turn(0.0)
            batch = batcher.next_batch(0.0)
            assert batch is not None
            batcher.on_batch_done(batch, [None] * len(batch), 0.0)
            ended += batch.calls
    if closes:
        ended += batcher.abandon()
    while not closes and batcher.queued:
        batcher.on_turn(0.0)
        batch = batcher.next_batch(0.0)
        assert batch is not None
        batcher.on_batch_done(batch, [None] * len(batch), 0.0)
        ended += batch.calls
    assert len(ended) == len(made) and set(map(id, ended)) == set(map(id, made))
    assert batcher.queued == batcher.unfinished == 0


def test_a_device_that_answers_early_has_no_families() -> None:
    """There each group is expected back by itself; elsewhere the same calls are of a family."""
    for early in (False, True):
        batcher = Batcher(BatchLimits())
        batcher.expected_callers = ExpectedCallers(BatchLimits()) if early else None
        for weight in range(3):
            batcher.submit(PendingCall(Key(weight), (weight,), Key(weight), 1.0), 0.0)
        families_of = {queue.family for queue in batcher.round_robin.all_queues()}
        assert (families_of == {None}) == early
