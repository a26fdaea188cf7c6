"""A request over ops, batched functions, read-backs and spawned calls, cancelled at every turn."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.runtime import Runtime
from tests.native.twins import both_paths as both_paths

CALLERS, WIDTH = 4, 4
WEIGHT = torch.eye(WIDTH)


class Shift:
    """A function over rows of one object."""

    def rows(self, x: Tensor, by: list[float], counts: list[int]) -> Tensor:
        return x + torch.cat([torch.full((n, 1), b) for n, b in zip(counts, by, strict=True)])


async def request(runtime: Runtime, shift: Shift, value: float, refs: list[weakref.ref[Tensor]]) -> float:
    """One caller's program: x becomes x + 3."""
    x = torch.full((1, WIDTH), value)
    for step in range(2):
        x = await lz.linear(x, WEIGHT)
        refs.append(weakref.ref(x))
        x = await lz.batched(shift.rows)(x, 1.0)
        refs.append(weakref.ref(x))
        x = await lz.to_host(x)
        if step == 0:
            x = await runtime.spawn(_spawned(shift, x))
    return float(x[0, 0])


async def _spawned(shift: Shift, x: Tensor) -> Tensor:
    x = await lz.batched(shift.rows)(await lz.linear(x, WEIGHT), 1.0)
    copied: Tensor = await lz.to_host(x)
    return copied


async def sweep(runtime: Runtime, way: str, victim: int, at: int) -> bool:
    """Whether the victim, ended in turn `at`, was hit; the others have their values and nothing stays."""
    shift, refs = Shift(), list[weakref.ref[Tensor]]()
    # Known to be short, so that every batch runs in the loop's own turns and turn k is the same each time.
    lz.batched(shift.rows).us_per_row = 1.0
    start: Any = runtime.spawn if way == "spawned" else asyncio.ensure_future
    calls = [start(request(runtime, shift, float(index), refs)) for index in range(CALLERS)]
    waits = [asyncio.ensure_future(outcome(call)) for call in calls]
    turn = 0
    while not all(wait.done() for wait in waits):
        if turn == at or (way == "twice" and turn == at + 1):
            calls[victim].cancel()
        await asyncio.sleep(0)
        turn += 1
        assert turn < 2000, "somebody is stranded"
    outcomes = [wait.result() for wait in waits]
    hit = outcomes[victim] is None
    for index, value in enumerate(outcomes):
        assert value == index + 3 or (index == victim and hit), (index, value)
    del calls, waits
    await asyncio.sleep(0)
    lane = runtime.device("cpu").loop_drivers.current().batcher
    stats = lane.stats
    assert lane.inflight_batches == lane.unfinished == 0
    assert stats.submitted == stats.done + stats.cancelled
    for _ in range(20):  # a cancelled task and its traceback are a cycle
        if all(ref() is None for ref in refs):
            return hit
        gc.collect()
        await asyncio.sleep(0)
    raise AssertionError("an argument lives on")


async def outcome(call: Awaitable[float]) -> float | None:
    """What a call gave; None where it was cancelled."""
    try:
        return await call
    except asyncio.CancelledError:
        return None


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["once", "twice", "spawned"])
@pytest.mark.parametrize("victim", [0, CALLERS - 1])
async def test_cancelling_at_every_turn_of_a_request_leaves_no_trace(way: str, victim: int) -> None:
    """For every k: cancelled in turn k, the others get their values and no pending call or tensor is left."""
    # No batch follows another without a turn, so that there is a turn to be cancelled in before each.
    settings = lz.Settings(
        device="cpu", inference=True, inline_limit_us=1e9, max_inline_us=0, max_batch_size=3, max_queue_size=3
    )
    async with lz.start(settings, scoped=True) as runtime:
        hits, hit = 0, False
        for at in range(400):
            hit = await sweep(runtime, way, victim, at)
            hits += hit
            if not hit and at > 0:
                break
        assert hits >= 6, "the sweep reached every call of the program"
        assert not hit, "the sweep went on until the victim had ended by itself"
