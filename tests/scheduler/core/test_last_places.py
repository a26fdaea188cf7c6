"""The last place at which a group's callers wait, kept as calls come and go: as a look at all finds it."""

from __future__ import annotations

import random

import pytest

from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.limits import BatchLimits
from layerzero.scheduler.core.pending_call import Batch, Caller, PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue, RoundRobin


def check(batcher: Batcher) -> None:
    """Compare with every place of every group."""
    order = batcher.round_robin
    order._push_activated()
    for queue in order.all_queues():
        assert queue.top == max((point.order for point in queue.active_points), default=-1)


@pytest.mark.parametrize("seed", range(20))
def test_the_last_place_is_what_a_look_at_all_would_find(seed: int) -> None:
    """Through random branches, cancelled calls, batches that take a part, and places that are forgotten."""
    rng = random.Random(seed)
    batcher = Batcher(BatchLimits(max_batch_size=rng.choice((2, 64)), max_program_points=rng.choice((4, 64))))
    callers = [Caller() for _ in range(12)]
    waiting: dict[Caller, PendingCall] = {}
    running: list[Batch] = []
    now_s = 0.0
    for _ in range(300):
        now_s += 1e-3
        free = [caller for caller in callers if caller not in waiting]
        what = rng.random()
        if what < 0.5 and free:
            caller = rng.choice(free)
            call = PendingCall("op", (), rng.choice("abcdef"), 1.0, caller=caller)
            waiting[caller] = call
            batcher.submit(call, now_s)
        elif what < 0.6 and waiting:
            caller = rng.choice(list(waiting))
            if batcher.cancel(waiting[caller]):
                del waiting[caller]
        else:
            batcher.on_turn(now_s)
            if running:
                batch = running.pop()
                batcher.on_batch_done(batch, [None] * len(batch), now_s)
                for call in batch.calls:
                    if call.caller is not None and waiting.get(call.caller) is call:
                        del waiting[call.caller]
                batcher.on_turn(now_s)
            if (taken := batcher.next_batch(now_s)) is not None:
                running.append(taken)
        check(batcher)
    assert batcher.stats.batches


def test_places_in_use_are_not_searched_at_each_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far beyond the bound, where every place has a call that waits, few of 3,000 new ones look at all."""
    searches: list[int] = []
    prune = RoundRobin._prune

    def counted(self: RoundRobin, keep: BatchQueue) -> None:
        searches.append(self.size)
        prune(self, keep)

    monkeypatch.setattr(RoundRobin, "_prune", counted)
    batcher = Batcher(BatchLimits(max_program_points=100))
    for number in range(3000):
        assert batcher.submit(PendingCall("op", (), number, 1.0), 0.0)
    assert batcher.round_robin.size == 3000
    assert 0 < len(searches) < 60
