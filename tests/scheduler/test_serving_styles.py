"""How requests of a server come, part, fork and end, in virtual time, beside schedules that know all of it.

A request is a list of steps; a step is so many calls of one group at once, whose results it reads before the
next. The device takes a group's pass, and its share for each row. The ratio of a load is its time over that
of the best of several schedules that are told every request beforehand, lose no time between batches, and
have every caller back at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.readback import Readback
from layerzero.spec.settings import Settings
from tests.clocks import run_virtually
from tests.scheduler.devices import Double, Later

OP = Double()
HERE = (0, 0, 0)
# What a batch of a group takes, in seconds, and each of its rows.
COSTS: dict[str, tuple[float, float]] = {
    "decode": (4e-3, 2e-5),
    "other model": (3e-3, 2e-5),
    "prefill": (8e-3, 4e-3),
    "draft": (5e-4, 5e-6),
    "verify": (5e-3, 5e-5),
    **{f"adapter {number}": (4e-4, 1e-5) for number in range(4)},
}
PASS_S = COSTS["decode"][0]
REQUESTS = 16


class Step(NamedTuple):
    """Calls of one group that a request makes at once."""

    group: str
    calls: int = 1


Request = list[Step]
Load = list[tuple[float, Request]]  # when each request comes


class Device(Later):
    """A device whose batches take what `COSTS` says of their group, which every call names."""

    spans = None

    def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
        pass_s, row_s = COSTS[calls[0][1]]
        self.pass_s = pass_s + row_s * len(calls)
        return super().execute(op, calls, modes, snapshot)


def served_s(worker: Worker, load: Load) -> tuple[float, list[int]]:
    """Seconds that the loop's scheduler takes from the first request to the end of the last; its batches."""

    async def main() -> tuple[float, list[int]]:
        loop = asyncio.get_running_loop()
        device: Any = Device(loop, PASS_S)
        front = LoopDriver(loop, device, worker, Settings(), always_inline=True, streams=device)
        front.readback = readback = Readback(front, device, device)

        async def call(group: str) -> None:
            ticket: PendingCall = PENDING_CALL.cls(OP, (torch.ones(1), group), group, 1.0)
            assert float(await readback.start(await front.submit(ticket), HERE)) == 2.0

        async def request(at: float, steps: Request) -> None:
            await asyncio.sleep(at)
            for step in steps:
                if step.calls == 1:
                    await call(step.group)
                else:
                    await asyncio.gather(*(call(step.group) for _ in range(step.calls)))

        begin = loop.time()
        await asyncio.gather(*(request(*each) for each in load))
        ended = loop.time()
        await asyncio.sleep(0)
        lane = front.batcher
        assert (
            lane.unfinished == lane.queued == lane.inflight_batches == len(lane.expected_callers or ()) == 0
        )
        return ended - begin, device.runs

    return run_virtually(main())


class Waiting(NamedTuple):
    """Requests that wait for one group: who, how far the least of them is, and when it was last served."""

    group: str
    members: list[int]
    calls: int
    least_done: int
    last_served: float


# Who goes first where several groups wait.
SCHEDULES: dict[str, Callable[[Waiting], Any]] = {
    "the largest": lambda waiting: -waiting.calls,
    "who has come least far": lambda waiting: waiting.least_done,
    "in turns": lambda waiting: waiting.last_served,
    "the longest pass": lambda waiting: -COSTS[waiting.group][0],
    "the shortest pass": lambda waiting: COSTS[waiting.group][0],
}


def clairvoyant_s(load: Load) -> float:
    """Seconds of the best of `SCHEDULES`, each with all requests known and everybody back at once."""
    return min(_schedule_s(load, first) for first in SCHEDULES.values())


def _schedule_s(load: Load, first: Callable[[Waiting], Any]) -> float:
    now, done, served = 0.0, [0] * len(load), dict.fromkeys(COSTS, -1.0)
    while any(count < len(steps) for count, (_, steps) in zip(done, load, strict=True)):
        groups: dict[str, list[int]] = {}
        for number, (at, steps) in enumerate(load):
            if at <= now and done[number] < len(steps):
                groups.setdefault(steps[done[number]].group, []).append(number)
        if not groups:
            now = min(at for number, (at, _) in enumerate(load) if at > now and not done[number])
            continue
        waiting = [
            Waiting(group, members, sum(load[n][1][done[n]].calls for n in members),
                    min(done[n] for n in members), served[group])
            for group, members in groups.items()
        ]  # fmt: skip
        taken = min(waiting, key=first)
        pass_s, row_s = COSTS[taken.group]
        now += pass_s + row_s * taken.calls
        served[taken.group] = now
        for number in taken.members:
            done[number] += 1
    return now


def lengths(draw: random.Random, low: int = 20, high: int = 60) -> list[int]:
    return [draw.randint(low, high) for _ in range(REQUESTS)]


def together(requests: list[Request]) -> Load:
    return [(0.0, steps) for steps in requests]


def poisson(draw: random.Random, requests: list[Request], mean_s: float) -> Load:
    """Requests that come one by one, at random."""
    at, load = 0.0, []
    for steps in requests:
        load.append((at, steps))
        at += draw.expovariate(1 / mean_s)
    return load


def joins_and_leaves(draw: random.Random) -> Load:
    """Three times as many requests as are ever there at once, each of its own length."""
    requests = [[Step("decode")] * draw.randint(5, 40) for _ in range(3 * REQUESTS)]
    return poisson(draw, requests, 2 * PASS_S)


def one_to_a_thousand(draw: random.Random) -> Load:
    return together([[Step("decode")] * max(1, 1000 * n * n // REQUESTS**2) for n in range(1, REQUESTS + 1)])


def two_models(draw: random.Random) -> Load:
    models = ("decode", "other model")
    return together([[Step(models[n % 2])] * length for n, length in enumerate(lengths(draw))])


def branches(draw: random.Random) -> Load:
    """Of two models each step asks one."""
    models = ("decode", "other model")
    return together([[Step(draw.choice(models)) for _ in range(length)] for length in lengths(draw)])


def beams(draw: random.Random) -> Load:
    """One beam forks into two, four, and ends as two: each a task of its own, a step."""
    forks = ((1, 1), (2, 4), (4, 20), (2, 5))
    return together([[Step("decode", beam) for beam, n in forks for _ in range(n)]] * (REQUESTS // 2))


def guidance_pairs(draw: random.Random) -> Load:
    """With and without the prompt, side by side, among requests without guidance."""
    return together([[Step("decode", 1 + n % 2)] * length for n, length in enumerate(lengths(draw))])


def speculative(draw: random.Random, count: int = REQUESTS) -> list[Request]:
    """Four drafted tokens, one check, so often as what was accepted wants."""
    rounds = [draw.randint(8, 16) for _ in range(count)]
    return [[*[Step("draft")] * 4, Step("verify")] * n for n in rounds]


def speculation_beside_plain(draw: random.Random) -> Load:
    plain = [[Step("verify")] * draw.randint(20, 40) for _ in range(REQUESTS // 2)]
    return together(speculative(draw, REQUESTS // 2) + plain)


def adapters(draw: random.Random) -> Load:
    """A base that all share, then the request's own adapter."""
    return together(
        [
            [Step("decode"), Step(f"adapter {n % 4}")] * length
            for n, length in enumerate(lengths(draw, 10, 30))
        ]
    )


def prefill_beside_decode(draw: random.Random) -> Load:
    requests = [[Step("prefill"), *[Step("decode")] * length] for length in lengths(draw)]
    return poisson(draw, requests, 6 * PASS_S)


# Each load, and what of the clairvoyant schedules' time it may take. Where requests ask one of several groups
# at each step, a schedule that knows them all waits for those who will come to the same group.
LOADS: dict[str, tuple[Callable[[random.Random], Load], float]] = {
    "straight": (lambda draw: together([[Step("decode")] * 40] * REQUESTS), 1.01),
    "joins and leaves": (joins_and_leaves, 1.01),
    "lengths of 1 to 1,000": (one_to_a_thousand, 1.01),
    "two models": (two_models, 1.01),
    "branches": (branches, 1.25),
    "beam search": (beams, 1.01),
    "guidance pairs": (guidance_pairs, 1.045),  # where a pair has ended, others wait a grace for another
    "speculation": (lambda draw: together(speculative(draw)), 1.01),
    "speculation beside plain decoding": (speculation_beside_plain, 1.28),
    "adapters by request": (adapters, 1.1),
    "prefill beside decode": (prefill_beside_decode, 1.03),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_style_takes_what_a_schedule_takes_that_knows_it(worker: Worker, name: str) -> None:
    """However requests come, part, fork and end, nothing but a known bound is lost to not knowing it."""
    make, bound = LOADS[name]
    for seed in range(3):
        load = make(random.Random(seed))
        took, runs = served_s(worker, load)
        best = clairvoyant_s(load)
        assert sum(runs) == sum(step.calls for _, steps in load for step in steps)
        assert took <= bound * best, (took / best, sum(runs) / len(runs), runs)
