"""Two devices of a cluster, which serve one test after another; who ends a process sees its next life."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

import layerzero as lz
from layerzero.actors.remote.pool import DevicePool
from layerzero.speculative.remote import remote_decoder
from tests.distributed import drafts, hosted
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device_pool(ray_cluster: Any) -> AsyncIterator[DevicePool]:
    """Devices that may die as often as the tests want."""
    settings = lz.Settings(cluster="auto", device="cpu", max_restarts=100, placement_timeout_s=LIMIT_S)
    async with lz.start(settings) as runtime:
        yield runtime.device_pool


async def began(device_pool: DevicePool, *names: str) -> None:
    """Wait until calls that linger have begun on the first device."""

    async def seen() -> bool:
        return {f"{name} began" for name in names} <= set(await device_pool.run(hosted.events, on="gpu-0"))

    await until(seen)


def kill(device_pool: DevicePool, name: str = "gpu-0") -> None:
    os.kill(device_pool.devices[name].facts.pid, signal.SIGKILL)


async def test_a_killed_process_costs_only_what_had_started(device_pool: DevicePool) -> None:
    """A started call fails as not retryable, an idempotent one runs again, a new one waits.

    Streams that may resume deliver exactly the tokens of a run without a kill.
    """
    before, restarts = (
        device_pool.devices["gpu-0"].facts.incarnation,
        (await device_pool.health())[0].restarts,
    )
    first = asyncio.Event()

    async def generation(seed: int) -> list[int]:
        got = []
        async for token in device_pool.stream(hosted.tokens, seed, 25, 0.02, resume=True):
            got.append(token)
            if len(got) == 5:
                first.set()
        return got

    started = asyncio.ensure_future(device_pool.run(hosted.linger, "started", 600.0, on="gpu-0"))
    again = asyncio.ensure_future(device_pool.run(hosted.linger, "again", 0.7, on="gpu-0", idempotent=True))
    streams = [asyncio.ensure_future(generation(seed)) for seed in range(16)]
    await began(device_pool, "started", "again")
    await first.wait()
    kill(device_pool)
    with pytest.raises(lz.DeviceLostError, match="it had started") as lost:
        await started
    assert not lost.value.retryable
    assert await device_pool.run(hosted.add, 1, on="gpu-0") == 2
    assert await again == "again"
    for seed, tokens in enumerate(await asyncio.gather(*streams)):
        assert tokens == [t async for t in hosted.tokens(seed, 25)]
    assert device_pool.devices["gpu-0"].facts.incarnation != before
    assert (await device_pool.health())[0].restarts == restarts + 1


async def test_a_sticky_fault_ends_the_process_and_blames_the_last_kernel(device_pool: DevicePool) -> None:
    """An error after which every call would fail is answered as a lost device; the next life serves."""
    before = device_pool.devices["gpu-0"].facts.pid
    with pytest.raises(lz.DeviceLostError, match="illegal memory access"):
        await device_pool.run(hosted.faulty, on="gpu-0")
    await until(lambda: device_pool.devices["gpu-0"].facts.pid != before)
    assert (await device_pool.run(hosted.norm, 3, on="gpu-0"))[0]


async def test_a_tensor_moves_from_device_to_device(device_pool: DevicePool) -> None:
    """Shipped between two devices without passing through the caller; errors of strange tensors are named."""
    tensor = torch.randn(8, 4)
    there = await device_pool.ship(tensor, to="gpu-0")
    moved = await device_pool.ship(there, to="gpu-1")
    assert moved.device == "gpu-1"
    assert torch.equal(await device_pool.fetch(moved), tensor)
    with pytest.raises(ValueError, match=r"pool\.ship"):
        await device_pool.run(hosted.total, there, on="gpu-1")


@pytest.mark.slow
async def test_rolling_restart_under_load_fails_nobody(device_pool: DevicePool) -> None:
    """Every device is in a new life, every call was answered; a tensor of an earlier life is lost by name."""
    before = {facts.name: facts.incarnation for facts in device_pool.facts}
    there = await device_pool.ship(torch.ones(4), to="gpu-0")
    stop = asyncio.Event()
    answers = 0

    async def client() -> None:
        nonlocal answers
        while not stop.is_set():
            assert await device_pool.run(hosted.add, 1) == 2
            answers += 1
            await asyncio.sleep(0.05)

    clients = [asyncio.ensure_future(client()) for _ in range(8)]
    await device_pool.rolling_restart()
    stop.set()
    await asyncio.gather(*clients)
    assert answers > 8
    assert all(facts.incarnation != before[facts.name] for facts in device_pool.facts)
    with pytest.raises(lz.DeviceLostError, match="earlier incarnation"):
        await device_pool.ship(there, to="gpu-1")


async def test_what_cannot_travel_is_named(device_pool: DevicePool) -> None:
    """Arguments on the way there, results and exceptions on the way back."""
    with pytest.raises(TypeError, match="travel"):
        await device_pool.run(hosted.total, threading.Lock())
    with pytest.raises(TypeError, match="the result, lock, cannot travel"):
        await device_pool.run(hosted.a_lock)
    with pytest.raises(RuntimeError, match="OddError: odd"):
        await device_pool.run(hosted.fail, "odd")


async def test_the_draft_of_a_speculation_lives_on_another_device_than_the_target(
    device_pool: DevicePool,
) -> None:
    """Two actors: the text is that of one process, also where the draft's device dies in the middle."""
    options: dict[str, Any] = {"num_speculative_tokens": 3, "max_tokens": 40, "seed": 5}
    here = lz.speculative.generate(drafts.Chain(1, 0.3), drafts.Chain(2, 0.0), [0, 1], **options)
    wanted = [token async for token in here]
    pids, restarts = [each.pid for each in device_pool.facts], (await device_pool.health())[0].restarts
    assert pids[0] != pids[1]
    async with (
        remote_decoder(device_pool, drafts.Chain, 1, 0.3, on="gpu-0") as draft,
        remote_decoder(device_pool, drafts.Chain, 2, 0.0, on="gpu-1") as target,
    ):
        generation = lz.speculative.generate(draft, target, [0, 1], **options)
        got: list[int] = []
        async for token in generation:
            got.append(token)
            if len(got) == 15:
                assert [await device_pool.run(drafts.opened, on=name) for name in ("gpu-0", "gpu-1")] == [
                    (pids[0], ["chain 1"]), (pids[1], ["chain 2"])
                ]  # fmt: skip
                kill(device_pool)
        assert got == wanted and generation.stats.num_accepted == here.stats.num_accepted > 0
    assert (await device_pool.health())[0].restarts == restarts + 1
    assert [(await device_pool.run(drafts.opened, on=name))[1] for name in ("gpu-0", "gpu-1")] == [[], []]


async def test_the_devices_of_a_pool_choose_once(device_pool: DevicePool) -> None:
    """Of two that are asked the same one chooses; the other takes its choice and says whose it is."""
    first, *others = [await device_pool.run(hosted.choose_norm, 7, on=name) for name in ("gpu-0", "gpu-1")]
    assert first["joined"] and (first["shared"], others[0]["shared"]) == (0, 1)
    assert [other["kernel"] for other in others] == [first["kernel"]]
    assert "(chosen by " in others[0]["why"] and "(chosen by " not in first["why"]


# Last: it closes the devices.
async def test_a_device_leaves_nothing_behind(device_pool: DevicePool, ray_cluster: Any) -> None:
    """After close: no actor, no place taken, no journal, no socket's folder."""
    device = device_pool.devices["gpu-0"]
    pid, socket = device.facts.pid, device.address.path  # type: ignore[attr-defined]
    assert socket in Path("/proc/net/unix").read_text()  # noqa: ASYNC240  a look, between two awaits
    await device_pool.close()
    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert socket not in Path("/proc/net/unix").read_text()  # noqa: ASYNC240
    journals = Path(tempfile.gettempdir()) / f"layerzero-{os.getuid()}"
    assert [p for p in journals.rglob("*.journal") if str(pid) in p.name] == []
    # Ray's view of what is free lags behind.
    await until(lambda: ray_cluster.available_resources().get("GPU") == 2.0)
