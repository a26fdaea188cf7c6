"""What a batcher keeps of calls that have ended: nothing, however they ended."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.scheduler.core.pending_call import Batch, Caller, Failure, PendingCall

OWN = (PendingCall, Caller, Batch, Failure, asyncio.Task, asyncio.TimerHandle, Tensor)
NORM, WEIGHT = torch.ones(16), torch.randn(16, 16)


class Poisoned(Exception):
    """What the batched function raises for a caller that asks for it."""


def scaled(rows: Tensor, bad: list[bool]) -> Tensor:
    if any(bad):
        raise Poisoned("one caller asked for this")
    return rows * 0.5


async def _request(draw: random.Random, spoil: Any) -> None:
    x = torch.randn(draw.choice((1, 2, 4)), 16)
    for _ in range(3):
        timeout = draw.choice((None, None, 0.0, 0.001, 0.2))
        try:
            x = await lz.linear(
                await lz.rms_norm(x, NORM, timeout=timeout), WEIGHT, priority=draw.randrange(3)
            )
            x = await spoil(x, draw.random() < 0.05)
        except (lz.DeadlineExceededError, lz.OverloadedError, Poisoned):
            return


async def _churn(seed: int, spoil: Any) -> Counter[str]:
    """Some hundred requests, a third of them given up; how many of what a batcher makes is alive
    afterwards."""
    draw = random.Random(seed)
    for _ in range(6):
        requests = [asyncio.ensure_future(_request(draw, spoil)) for _ in range(48)]
        await asyncio.sleep(draw.random() * 0.004)
        cancelled = [request.cancel() for request in draw.sample(requests, 16)]
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(one) for one in ended} <= {type(None), asyncio.CancelledError}
        assert len(cancelled) == 16
        del ended, requests
    await asyncio.sleep(0.25)  # the timers of deadlines that were not reached
    gc.collect()
    return Counter(kind.__name__ for one in gc.get_objects() for kind in OWN if type(one) is kind)


def test_calls_that_ended_are_gone() -> None:
    """Done, cancelled, expired, refused or failed: the third thousand calls leave no more than the first."""
    settings = lz.Settings(
        device="cpu", inference=True, warm="off", perfdb=None, max_queue_size=64, queue_full_policy="reject"
    )
    with lz.start(settings, scoped=True) as runtime:
        spoil = lz.batched(scaled, pure=True)

        async def thrice() -> list[Counter[str]]:
            return [await _churn(seed, spoil) for seed in range(3)]

        first, *_, last = asyncio.run(thrice())
        stats = runtime.device("cpu").loop_drivers.stats()
        assert stats.submitted == stats.ended
        assert all(getattr(stats, name) > 0 for name in ("done", "failed", "cancelled", "expired"))
    assert last["PendingCall"] == last["Batch"] == last["Failure"] == 0
    assert {kind: last[kind] - first[kind] for kind in last if last[kind] > first[kind]} == {}
