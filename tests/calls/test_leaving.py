"""Callers of real ops that go away at every point: tasks, spawned coroutines, batched functions, appends."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import KVCacheSpec, PagedCache

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the pages' strict kernel"
)
WIDTH, CALLERS, STEPS = 8, 5, 3
WEIGHT = torch.randn(WIDTH, WIDTH) / 4
Drive = Callable[[lz.Runtime, Awaitable[Any]], "asyncio.Future[Any]"]


def halved(x: Tensor) -> Tensor:
    """A function over rows, for `lz.batched`."""
    return x / 2


async def request(cache: PagedCache, x: Tensor, held: set[int]) -> Tensor:
    """One request: every step goes through ops, a batched function and the pool; its pages go with it."""
    sequence = cache.new()
    held.add(sequence)
    try:
        for _ in range(STEPS):
            x = await lz.linear(x, WEIGHT)
            x = await lz.batched(halved)(x)
            slot_mapping = cache.extend([sequence], [1])
            await lz.append_kv(x[:, None], x[:, None], cache.k_cache, cache.v_cache, slot_mapping)
            tables, lengths = cache.block_tables([sequence])
            out = await lz.paged_attention(x[:, None], cache.k_cache, cache.v_cache, tables, lengths)
            x = await lz.rms_norm(out[:, 0], None)
        return x
    finally:
        cache.free(sequence)
        held.discard(sequence)


def as_task(runtime: lz.Runtime, coro: Any) -> asyncio.Future[Any]:
    """An ordinary task."""
    task: asyncio.Future[Any] = asyncio.ensure_future(coro)
    return task


def as_spawned(runtime: lz.Runtime, coro: Any) -> asyncio.Future[Any]:
    """A coroutine that the batcher steps."""
    return asyncio.ensure_future(runtime.spawn(coro))


async def lives(runtime: lz.Runtime, drive: Drive, victim: int, at: int) -> tuple[bool, list[Tensor | None]]:
    """All requests together, one cancelled after `at` turns: whether that hit it, and everybody's result."""
    cache = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=WIDTH), pages=CALLERS, page_size=STEPS)
    held: set[int] = set()
    rows = torch.randn(CALLERS, 1, WIDTH, generator=torch.Generator().manual_seed(0))
    tasks = [drive(runtime, request(cache, row, held)) for row in rows]
    for _ in range(at):
        if all(task.done() for task in tasks):
            break
        await asyncio.sleep(0)
    hit = tasks[victim].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    hit = hit and isinstance(results[victim], asyncio.CancelledError)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not held and cache.allocator.free_pages == CALLERS, f"pages leaked at {at}"
    front = runtime.device("cpu").loop_drivers.current()
    assert front.batcher.unfinished == 0 and front.batcher.queued == 0
    stats = front.batcher.stats
    assert stats.submitted == stats.done + stats.failed + stats.cancelled + stats.expired + stats.rejected
    failed = [result for result in results if isinstance(result, Exception)]
    assert not failed, failed
    return hit, [None if isinstance(r, BaseException) else r for r in results]


@pytest.mark.parametrize("drive", [as_task, as_spawned], ids=["task", "spawned"])
@pytest.mark.parametrize("inline_limit_us", [0.0, 1e9], ids=["worker", "inline"])
def test_a_caller_cancelled_at_any_turn_takes_only_itself(drive: Drive, inline_limit_us: float) -> None:
    """For every k: cancelled at turn k, the others have what they have without it, and no page is lost."""

    async def sweep(runtime: lz.Runtime) -> int:
        _, wanted = await lives(runtime, drive, 0, 100_000)
        hits = 0
        # Every turn, then ever further: while a worker is slow the loop makes many turns.
        for at in itertools.chain(range(100), (100 << n for n in range(16))):
            hit, results = await lives(runtime, drive, 2, at)
            hits += hit
            for index, (got, alone) in enumerate(zip(results, wanted, strict=True)):
                if index != 2 or not hit:
                    assert got is not None and alone is not None and torch.equal(got, alone), (at, index)
            if not hit:
                return hits
        raise AssertionError("the sweep never came to the end of the request")

    # No batch follows another without a turn, so that there is a turn to be cancelled in before each.
    how = lz.Settings(inline_limit_us=inline_limit_us, max_inline_us=0, warm="off", determinism="strict")
    with lz.start(how, scoped=True) as runtime:
        # Under strict determinism no other kernel may serve until this one is compiled.
        runtime.device("cpu").warm(["native.paged_attention.cpu"])
        assert asyncio.run(sweep(runtime)) >= STEPS * 5


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_first_call_without_gradients_leaves_the_loop_its_own_mode(block: Callable[[], Any]) -> None:
    """What a loop's first caller has entered is not taken for the loop's own: later graphs are built."""
    weight = torch.randn(4, 4, requires_grad=True)

    async def plain() -> bool:
        out = await lz.linear(torch.randn(1, 4), weight)
        return bool(out.requires_grad)

    async def lived() -> list[bool]:
        with block():
            await lz.linear(torch.randn(1, 4), weight)
        built = await asyncio.gather(plain(), plain(), plain())
        return [*built, torch.is_grad_enabled(), bool((weight * 2).requires_grad)]

    with lz.start(lz.Settings(warm="off"), scoped=True):
        try:
            assert asyncio.run(lived()) == [True] * 5
        finally:
            torch._C._set_grad_enabled(True)
