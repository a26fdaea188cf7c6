"""The pick rule under staggered arrivals, simulated on a virtual clock, against first in first out."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import pytest

from layerzero.scheduler.core.batcher import Batcher, BatchLimits
from layerzero.scheduler.core.pending_call import Batch, Caller, PendingCall

CALLERS = 64
ARRIVE_S = 0.020
LAYERS = 10
LAYER = ("norm1", "qkv", "attention", "out", "norm2", "mlp")
PASSES = 4
OP_S, ROW_S = 300e-6, 4e-6


class Fifo:
    """The naive policy: the oldest pending call's group runs with all that waits of it; no turn is given."""

    def __init__(self) -> None:
        self.waiting: list[PendingCall] = []
        self.sizes: list[int] = []

    def submit(self, ticket: PendingCall, now: float) -> bool:
        ticket.submitted_at = now
        self.waiting.append(ticket)
        return True

    def on_turn(self, now: float) -> None:
        """A turn means nothing here."""

    def next_batch(self, now: float) -> Batch | None:
        if not self.waiting:
            return None
        group = self.waiting[0].batch_key
        taken = [ticket for ticket in self.waiting if ticket.batch_key == group]
        self.waiting = [ticket for ticket in self.waiting if ticket.batch_key != group]
        self.sizes.append(len(taken))
        return Batch(taken, now)

    def on_batch_done(self, batch: Batch, outcomes: list[Any], now: float) -> None:
        """Nothing to remember."""


def program() -> list[tuple[Any, ...]]:
    """The groups of one request, `PASSES` times through a model: attention is one group in all layers."""
    ops: list[tuple[Any, ...]] = []
    for layer in range(LAYERS):
        ops += [(name,) if name == "attention" else (name, layer) for name in LAYER]
    return ops * PASSES


def simulate(lane: Batcher | Fifo, resumed: Callable[[list[Caller]], list[Caller]] = list) -> float:
    """Run all callers through the program on a virtual clock; the time at which the last one ended.

    The device takes `OP_S` a batch and `ROW_S` a row. `resumed` is the order in which callers wake.
    """
    groups = program()
    rng = random.Random(7)
    arrivals = sorted((rng.uniform(0, ARRIVE_S), index) for index in range(CALLERS))
    heapq.heapify(arrivals)
    at_op: dict[Caller, int] = {}
    now = 0.0

    def call(caller: Caller) -> None:
        step = at_op[caller]
        if step < len(groups):
            lane.submit(PendingCall("op", (), groups[step], caller=caller), now)

    def arrive() -> None:
        while arrivals and arrivals[0][0] <= now:
            heapq.heappop(arrivals)
            caller = Caller()
            at_op[caller] = 0
            call(caller)

    while True:
        arrive()
        lane.on_turn(now)
        batch = lane.next_batch(now)
        if batch is None:
            if not arrivals:
                return now
            now = arrivals[0][0]
            continue
        now += OP_S + ROW_S * len(batch)
        arrive()
        lane.on_batch_done(batch, [None] * len(batch), now)
        callers = [ticket.caller for ticket in batch.calls]
        for caller in resumed([c for c in callers if c is not None]):
            at_op[caller] += 1
            call(caller)


def aligned_s() -> float:
    """The time of the same work had all callers arrived together."""
    return len(program()) * (OP_S + ROW_S * CALLERS)


def test_the_sweep_gathers_staggered_callers_where_fifo_does_not() -> None:
    """64 callers over 20 ms through a model of 60 ops meet in batches above 30, with FIFO below 8."""
    lane = Batcher()
    took = simulate(lane)
    fifo = Fifo()
    fifo_took = simulate(fifo)
    assert lane.stats.done == CALLERS * len(program())
    assert lane.stats.mean_batch > 30
    assert sum(fifo.sizes) / len(fifo.sizes) < 8
    assert took - ARRIVE_S < 1.2 * aligned_s()
    assert fifo_took > 3 * took


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_callers_wake_does_not_matter(seed: int) -> None:
    """Callers that wake in any order still meet at their next op."""
    rng = random.Random(seed)

    def shuffled(callers: list[Caller]) -> list[Caller]:
        rng.shuffle(callers)
        return callers

    lane = Batcher()
    simulate(lane, shuffled)
    assert lane.stats.mean_batch > 30


def test_slots_tell_layers_apart_that_share_a_group() -> None:
    """Attention is one group and, seen after each layer's own projection, one slot a layer."""
    lane = Batcher()
    simulate(lane)
    assert len(lane.round_robin.queues[("attention",)].points) == LAYERS


def test_a_smaller_memory_of_the_program_only_costs_batch_size() -> None:
    """A batcher that remembers fewer slots than the program has still serves everybody."""
    lane = Batcher(BatchLimits(max_program_points=16))
    simulate(lane)
    assert lane.stats.done == CALLERS * len(program())
    assert lane.round_robin.size <= 16 + CALLERS
