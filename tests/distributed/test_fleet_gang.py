"""Rank groups on the devices of a device pool: real actors, gloo between them, one rank killed in the
middle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import layerzero as lz
from tests.distributed import shards
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(ray_cluster: Any) -> AsyncIterator[lz.Runtime]:
    """Two devices, on which one rank group after another lives."""
    settings = lz.Settings(
        cluster="auto", device="cpu", inference=True, perfdb=None, hang_s=4.0, max_restarts=100,
        placement_timeout_s=LIMIT_S,
    )  # fmt: skip
    async with lz.start(settings) as runtime:
        yield runtime


async def texts(group: Any, count: int, n: int, pause: float, first: asyncio.Event) -> list[list[int]]:
    """Seeded texts, all under way at once; `first` is set at the first token."""

    async def one(seed: int) -> list[int]:
        got = []
        async for token in group.stream(shards.tokens, seed, n, pause, resume=True):
            got.append(token)
            first.set()
        return got

    return list(await asyncio.gather(*map(one, range(count))))


async def whole(group: Any, seed: int, n: int, begun: set[int] | None = None) -> list[int]:
    """A text that may not resume; its seed is in `begun` from the first token on."""
    got = []
    async for token in group.stream(shards.tokens, seed, n):
        got.append(token)
        if begun is not None:
            begun.add(seed)
    return got


async def test_a_gang_lives_on_the_fleets_devices_and_its_killed_ranks_come_back(
    runtime: lz.Runtime,
) -> None:
    """Tokens are those of one process, after the kill of either rank too, and no client sees a failure.

    A stream that may not resume is told, and the rank group serves the next one.
    """
    async with lz.remote_rank_group(shards.shard, 2, timeout_s=30.0) as group:
        wanted = [shards.text(seed, 12) for seed in range(6)]
        assert await texts(group, 6, 12, 0.0, asyncio.Event()) == wanted
        facts = await group.run(shards.facts)
        assert facts["ranks"] == 2 and facts["plan"] == group.plan_digest and max(facts["ran"]) > 1
        with pytest.raises(KeyError, match="the caller's own"):
            await group.run(shards.wrong)
        assert group.epoch == 1
        wanted = [shards.text(seed, 40) for seed in range(6)]
        for victim, epoch in ((1, 2), (0, 3)):
            device = group.devices[victim]
            pids = [await each.run(shards.pid) for each in group.devices]
            first, begun, got = asyncio.Event(), asyncio.Event(), list[int]()

            async def cut(begun: asyncio.Event = begun, got: list[int] = got) -> None:
                async for token in group.stream(shards.tokens, 1, 10_000, 0.01):
                    got.append(token)
                    begun.set()

            running_texts = asyncio.ensure_future(texts(group, 6, 40, 0.02, first))
            cut_short = asyncio.ensure_future(cut())
            await first.wait()
            await begun.wait()
            os.kill(device.facts.pid, signal.SIGKILL)
            with pytest.raises(lz.DeviceLostError) as lost:
                await cut_short
            assert lost.value.retryable is False and got == shards.text(1, len(got))
            assert await running_texts == wanted
            assert group.epoch == epoch
            assert not set(pids) & {each.facts.pid for each in group.devices}, "the rank group restarts whole"
        assert await whole(group, 2, 5) == shards.text(2, 5)


async def test_a_rank_that_cannot_build_ends_the_start_with_its_error(runtime: lz.Runtime) -> None:
    """The builder's own error, not what the other rank saw of it; the pool's devices stay."""
    with pytest.raises(ValueError, match="no weights on this rank"):
        async with lz.remote_rank_group(shards.broken, 2, timeout_s=20.0):
            raise AssertionError("it must not begin")
    for wrong in (0, 3):
        with pytest.raises(
            lz.ConfigurationError, match=f"ranks needs 1 to 2 devices of the pool, got {wrong}"
        ):
            lz.remote_rank_group(shards.shard, wrong)
    async with lz.remote_rank_group(shards.shard, ["gpu-1"]) as alone:
        assert [t async for t in alone.stream(shards.tokens, 3, 5)] == shards.text(3, 5)


async def test_a_rank_that_hangs_fails_the_gang_whole(runtime: lz.Runtime, tmp_path: Path) -> None:
    """The watchdog ends the rank, all begin again; every caller is answered, who may resume does."""
    flag = tmp_path / "hang"
    await runtime.device_pool.prepare(shards.plant, str(flag))
    async with lz.remote_rank_group(shards.shard, 2, timeout_s=60.0) as group:
        pids = {each.facts.pid for each in group.devices}
        first = asyncio.Event()
        resumed = asyncio.ensure_future(texts(group, 4, 40, 0.02, first))
        begun: set[int] = set()
        cut = [asyncio.ensure_future(whole(group, seed, 10_000, begun)) for seed in range(3)]
        await first.wait()
        await until(lambda: len(begun) == 3)  # before its first token a text would wait for the next epoch
        flag.touch()
        lost = await asyncio.gather(*cut, return_exceptions=True)
        assert [type(error) for error in lost] == [lz.DeviceLostError] * 3, lost
        assert [getattr(error, "retryable", None) for error in lost] == [False] * 3
        assert await resumed == [shards.text(seed, 40) for seed in range(4)]
        assert group.epoch == 2 and not flag.exists()
        assert not pids & {each.facts.pid for each in group.devices}, "the rank group restarts whole"
        assert await whole(group, 5, 4) == shards.text(5, 4)


async def test_without_a_cluster_there_is_no_fleet_for_a_gang() -> None:
    """The message says what to set, and what a rank of its own passes."""
    async with lz.start(scoped=True):
        with pytest.raises(
            lz.ConfigurationError, match=r"build needs a device pool, Settings\(cluster=\.\.\.\), got none"
        ):
            lz.remote_rank_group(shards.shard, 2)
