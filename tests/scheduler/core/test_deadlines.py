"""The heap of deadlines: the nearest first, and no room for calls that have ended."""

from __future__ import annotations

import math
import random

from layerzero.scheduler.core.deadlines import Deadlines
from layerzero.scheduler.core.pending_call import PendingCall


def call_at(seq: int, deadline: float) -> PendingCall:
    """A call that was submitted as number `seq`."""
    call = PendingCall(None, (), deadline=deadline)
    call.seq = seq
    return call


def test_calls_that_have_ended_take_no_room() -> None:
    """Of 5,000 calls whose deadlines are far, one at a time, a few dozen entries stay."""
    deadlines = Deadlines()
    for seq in range(5000):
        deadlines.watch(call_at(seq, 1e9 + seq))
        del deadlines.by_seq[seq]
        assert len(deadlines) < 100
    assert deadlines.nearest == math.inf


def test_the_nearest_of_those_that_wait_comes_first() -> None:
    """Whatever has ended meanwhile, and however often the heap was tidied."""
    deadlines, rng = Deadlines(), random.Random(0)
    waiting: dict[int, float] = {}
    for seq in range(1000):
        waiting[seq] = rng.random()
        deadlines.watch(call_at(seq, waiting[seq]))
        if rng.random() < 0.8:
            gone = rng.choice(list(waiting))
            del waiting[gone], deadlines.by_seq[gone]
        first = min(waiting, key=lambda number: waiting[number], default=None)
        assert deadlines.nearest == (math.inf if first is None else waiting[first])
        assert first is None or deadlines.first().seq == first
