"""Traffic that branches, merges, comes and goes, in virtual time, against a schedule that knows all of it.

A caller is the list of groups that it calls, one after another. The device takes `BATCH_S` for a batch and
`ROW_S` for each of its calls; nothing here reads a clock.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from layerzero.scheduler.core.at_once import ImmediateGroups
from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.pending_call import Batch, Caller, PendingCall

BATCH_S, ROW_S = 60e-6, 3e-6  # what a batch takes, and each of its calls
KERNEL_S = 9e-6  # a call by itself, on its caller's thread
SHARE_S = 0.5e-3  # of calls at once, after which a caller lets others go on
CALLERS, LAYERS = 64, 4

Program = list[Hashable]
Arrivals = list[tuple[float, Program]]  # when each caller comes, and what it calls


class Machine:
    """One batcher on a virtual clock, whose callers call again as soon as they are answered.

    With `at_once` calls that few others may join run in their caller's step, as the await path does.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.lane = Batcher()
        if at_once:
            self.lane.at_once = ImmediateGroups(200.0, max_inline_us=500.0)
        self.now = 0.0
        self.sizes: dict[Hashable, list[int]] = {}
        self.left: dict[Caller, Iterator[Hashable]] = {}
        self.ended: list[float] = []
        self.at_once_calls = 0
        self.paused: deque[Caller] = deque()

    def call(self, caller: Caller) -> None:
        """The next calls of a caller, up to the first that waits, or a share of calls at once."""
        rule, until = self.lane.at_once, self.now + SHARE_S
        for group in self.left[caller]:
            costs = None if rule is None else rule.groups.get(group)
            if costs is None or rule is None:
                self.lane.submit(PendingCall("op", (), group, KERNEL_S * 1e6, caller=caller), self.now)
                return
            self.now += KERNEL_S
            self.at_once_calls += 1
            if costs.untimed:
                rule.timed(group, costs, KERNEL_S * 1e6)
            rule.call_ran(group, costs, caller)
            if self.now >= until:
                self.paused.append(caller)
                return
        del self.left[caller]
        self.ended.append(self.now)
        if rule is not None:
            rule.live.discard(caller.number)

    def run(self, arrivals: Arrivals) -> float:
        """Serve everybody; seconds from the first arrival to the last end."""
        waiting = [(at, number) for number, (at, _) in enumerate(arrivals)]
        heapq.heapify(waiting)
        callers = [Caller() for _ in arrivals]

        def arrive() -> None:
            while waiting and waiting[0][0] <= self.now:
                _, number = heapq.heappop(waiting)
                self.left[callers[number]] = iter(arrivals[number][1])
                if self.lane.at_once is not None:
                    self.lane.at_once.live.add(callers[number].number)
                self.call(callers[number])

        while True:
            arrive()
            for _ in range(len(self.paused)):
                self.call(self.paused.popleft())
            self.lane.on_turn(self.now)
            batch = self.lane.next_batch(self.now)
            if batch is not None:
                self._serve(batch, arrive)
            elif waiting and not self.paused:
                self.now = max(self.now, waiting[0][0])
            elif not self.paused:
                assert self.lane.unfinished == self.lane.queued == 0
                return self.now

    def _serve(self, batch: Batch, arrive: Callable[[], None]) -> None:
        self.sizes.setdefault(batch.calls[0].batch_key, []).append(len(batch))
        self.now += BATCH_S + ROW_S * len(batch)
        batch.ran_us = KERNEL_S * 1e6 + 1.0 * len(batch)
        arrive()
        callers = [call.caller for call in batch.calls]
        self.lane.on_batch_done(batch, [None] * len(batch), self.now)
        for caller in callers:
            assert caller is not None
            self.call(caller)

    @property
    def mean_batch(self) -> float:
        """Calls in a batch, in the mean."""
        return self.lane.stats.mean_batch


def clairvoyant_s(programs: list[Program]) -> float:
    """The time of callers that come together, served level by level: one batch for each group of a level."""
    took, calls = 0.0, 0
    for level in range(max(map(len, programs))):
        groups = [program[level] for program in programs if level < len(program)]
        took += BATCH_S * len(set(groups))
        calls += len(groups)
    return took + ROW_S * calls


def one_by_one_s(programs: list[Program]) -> float:
    """The time of the same calls, each run by itself."""
    return KERNEL_S * sum(map(len, programs))


def together(programs: list[Program]) -> Arrivals:
    """Everybody comes at once."""
    return [(0.0, program) for program in programs]


def apart(programs: list[Program], seconds: float, seed: int = 0) -> Arrivals:
    """Everybody comes at some time within so many seconds."""
    rng = random.Random(seed)
    return [(rng.uniform(0.0, seconds), program) for program in programs]


def straight(steps: int) -> list[Program]:
    """Everybody the same."""
    return [[(op, layer) for _ in range(steps) for layer in range(LAYERS) for op in "nlm"]] * CALLERS


def experts(steps: int, tail: int = 1) -> list[Program]:
    """One of eight experts in each layer, `tail` ops long or, every other of them, one op longer."""
    rng = random.Random(1)
    programs: list[Program] = []
    for _ in range(CALLERS):
        program: Program = []
        for _ in range(steps):
            for layer in range(LAYERS):
                expert = rng.randrange(8)
                program += [("norm", layer), ("router", layer)]
                program += [("expert", layer, expert, n) for n in range(tail + expert % 2 * (tail > 1))]
        programs.append(program)
    return programs


def adapters(count: int, steps: int) -> list[Program]:
    """A shared base with adapters of two ops beside it."""
    return [
        [
            group
            for _ in range(steps)
            for layer in range(LAYERS)
            for group in (
                ("norm", layer), ("a", layer, number % count), ("b", layer, number % count), ("base", layer)
            )
        ]
        for number in range(CALLERS)
    ]  # fmt: skip


def own_orders(steps: int) -> list[Program]:
    """The same eight groups, in an order of each caller's own."""
    rng = random.Random(2)
    return [rng.sample(range(8), 8) * steps for _ in range(CALLERS)]  # type: ignore[misc]


def models(count: int, steps: int) -> list[Program]:
    """A model of its own for each caller."""
    return [
        [(number, op, layer) for _ in range(steps) for layer in range(LAYERS) for op in "nlm"]
        for number in range(count)
    ]


# Traffic of callers that all come at once, and what of level by level it may take: less than all of it where
# that lets callers in branches of several lengths, or in orders of their own, drift apart.
LOADS: dict[str, tuple[Callable[[], list[Program]], float]] = {
    "straight": (lambda: straight(20), 1.0),
    "experts": (lambda: experts(20), 1.02),
    "experts of two or three ops": (lambda: experts(20, tail=2), 0.35),
    "16 adapters": (lambda: adapters(16, 20), 1.02),
    "64 adapters": (lambda: adapters(64, 20), 1.02),
    "own orders": (lambda: own_orders(20), 0.75),
    "32 models": (lambda: models(32, 10), 1.0),
    "lengths of 1 to 1,000": (
        lambda: [straight(1)[0] * max(1, 1000 * n * n // CALLERS**2 // 12) for n in range(1, CALLERS + 1)],
        1.05,
    ),
}


@pytest.mark.parametrize("load", LOADS)
def test_batches_are_as_large_as_level_by_level(load: str) -> None:
    """Callers that part meet again: the batcher takes no longer than a schedule that knows all programs."""
    make, bound = LOADS[load]
    programs = make()
    machine = Machine()
    took = machine.run(together(programs))
    assert machine.lane.stats.done == sum(map(len, programs))
    assert took <= bound * clairvoyant_s(programs) * (1 + 1e-9), (
        took / clairvoyant_s(programs),
        machine.mean_batch,
    )


@pytest.mark.parametrize("load", ["straight", "experts", "16 adapters", "own orders"])
@pytest.mark.parametrize("seed", range(3))
def test_callers_that_come_one_after_another_meet(load: str, seed: int) -> None:
    """Spread over the time of two steps they are served nearly as if they had come together."""
    programs = LOADS[load][0]()
    alone = clairvoyant_s(programs)
    took = Machine().run(apart(programs, alone / 10, seed))
    assert took < 1.35 * alone, took / alone


def test_callers_meet_again_behind_branches() -> None:
    """Behind eight experts all callers stand in one batch of the norm, in every layer and step."""
    machine = Machine()
    machine.run(together(experts(20)))
    assert {size for layer in range(LAYERS) for size in machine.sizes["norm", layer]} == {CALLERS}


def test_a_group_waits_for_others_of_its_callers_one_round() -> None:
    """Two groups that feed each other lie ahead of a third that follows both: its callers do not starve."""
    ring: list[Program] = [["a", "c", "a", "d"] * 10, ["c", "d"] * 400]
    machine = Machine()
    machine.run(together(ring))
    first, last = machine.ended
    assert first < 0.3 * last, machine.ended


@pytest.mark.parametrize(
    ("programs", "arrivals"),
    [
        (models(32, 120), together),
        (adapters(64, 80), together),
        (adapters(16, 80), together),
        (straight(200)[:1] + models(3, 200), together),
        (straight(150)[:4], lambda programs: apart(programs, 0.05)),
        (straight(30), lambda programs: apart(programs, 64 * 0.01)),  # about half of what one by one bears
        ([straight(1)[0] * n for n in (1, 1, 2, 3, 5, 8, 500)], together),
    ],
    ids=["32 models", "64 adapters", "16 adapters", "mixed models", "four callers", "poisson", "lengths"],
)
def test_few_that_may_meet_cost_no_more_than_one_by_one(programs: list[Program], arrivals: Any) -> None:
    """Whatever the groups, what is served takes at most a tenth longer than the calls one after another."""
    machine = Machine(at_once=True)
    due = arrivals(programs)
    took = machine.run(due)
    busy = sum(machine.lane.stats.sizes.values()) * BATCH_S + machine.lane.stats.done * ROW_S
    busy += machine.at_once_calls * KERNEL_S
    calls = sum(map(len, programs))
    assert machine.lane.stats.done + machine.at_once_calls == calls
    assert busy <= 1.1 * one_by_one_s(programs), (busy / one_by_one_s(programs), machine.mean_batch)
    assert machine.at_once_calls > 0.4 * calls
    assert took <= max(at for at, _ in due) + 1.1 * one_by_one_s(programs)


def test_a_crowd_is_batched_although_few_came_first() -> None:
    """A group that ran at once goes back to batches with the first callers too many."""
    machine = Machine(at_once=True)
    first = straight(200)[0]
    programs = [first, *straight(100)[:-1]]
    took = machine.run([(0.0, first), *((0.005, program) for program in programs[1:])])
    assert machine.at_once_calls > 100
    assert took < 0.005 + 1.3 * clairvoyant_s(programs), took / clairvoyant_s(programs)


def test_a_crowd_never_runs_at_once() -> None:
    """64 callers of one model are one batch at every op, with the rule as without it."""
    machine = Machine(at_once=True)
    programs = straight(50)
    took = machine.run(together(programs))
    assert machine.at_once_calls == 0
    assert took <= clairvoyant_s(programs) * (1 + 1e-9)
