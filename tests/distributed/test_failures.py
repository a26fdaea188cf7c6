"""What each failure of a device looks like to its callers, and what the next life knows of it."""

# ruff: noqa: ASYNC240  a look at a file of this machine, between two awaits

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.actors.fleet import Fleet
from layerzero.actors.port import DeviceState
from tests.distributed import hosted

pytestmark = [pytest.mark.ray, pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@asynccontextmanager
async def opened(devices: int = 1, **settings: Any) -> AsyncIterator[Fleet]:
    async with lz.start(
        lz.Settings(cluster="auto", cluster_devices=devices, device="cpu", **settings)
    ) as runtime:
        yield runtime.fleet


async def tell(fleet: Fleet) -> set[str]:
    return set(await fleet.run(hosted.events, on="gpu-0"))


async def running(fleet: Fleet, name: str) -> None:
    for _ in range(400):
        if f"{name} began" in await tell(fleet):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} did not begin")


def kill(fleet: Fleet, name: str = "gpu-0") -> None:
    os.kill(fleet.devices[name].facts.pid, signal.SIGKILL)


async def test_a_killed_process_costs_only_what_had_started(ray_cluster: Any) -> None:
    """A started call fails as not retryable, an idempotent one runs again, a new one waits."""
    async with opened() as fleet:
        before = fleet.devices["gpu-0"].facts.generation
        started = asyncio.ensure_future(fleet.run(hosted.linger, "started", 60.0, on="gpu-0"))
        again = asyncio.ensure_future(fleet.run(hosted.linger, "again", 0.7, on="gpu-0", idempotent=True))
        await running(fleet, "started")
        await running(fleet, "again")
        kill(fleet)
        with pytest.raises(lz.DeviceLostError, match="it had started") as lost:
            await started
        assert not lost.value.retryable
        assert await fleet.run(hosted.add, 1) == 2
        assert await again == "again"
        assert fleet.devices["gpu-0"].facts.generation != before
        assert (await fleet.health())[0].restarts == 1


async def test_generation_resumes_from_its_tokens(ray_cluster: Any) -> None:
    """Streams in the middle of a kill deliver exactly the tokens of a run without one."""
    async with opened() as fleet:
        first = asyncio.Event()

        async def generation(seed: int) -> list[int]:
            got = []
            async for token in fleet.stream(hosted.tokens, seed, 25, 0.02, resume=True):
                got.append(token)
                if len(got) == 5:
                    first.set()
            return got

        tasks = [asyncio.ensure_future(generation(seed)) for seed in range(16)]
        await first.wait()
        kill(fleet)
        results = await asyncio.gather(*tasks)
        for seed, tokens in enumerate(results):
            assert tokens == [t async for t in hosted.tokens(seed, 25)]
        assert (await fleet.health())[0].restarts == 1


async def test_two_deaths_quarantine_the_kernel_in_flight(ray_cluster: Any, tmp_path: Path) -> None:
    """The journal blames it, the second death takes it out, another kernel answers, a later process knows."""
    async with opened(state_dir=str(tmp_path)) as fleet:
        assert (await fleet.run(hosted.norm, 3))[0]
        decided = set(await fleet.run(hosted.decided))
        await asyncio.sleep(0.6)  # two signs of life, which carry what was decided
        await fleet.prepare(hosted.plant, "die")
        right, kernel = await fleet.run(hosted.norm, 4, idempotent=True)
        assert right
        assert not kernel.startswith("planted")
        assert (await fleet.health())[0].restarts == 2
        assert await fleet.run(hosted.quarantined) == ["planted.rms_norm.die"]
        assert decided <= set(await fleet.run(hosted.decided))
    assert [path.name.split("@")[0] for path in tmp_path.glob("*.json")] == ["planted.rms_norm.die"]
    async with opened(state_dir=str(tmp_path)) as fleet:
        await fleet.prepare(hosted.plant, "die")
        assert (await fleet.run(hosted.norm, 3))[0]
        assert (await fleet.health())[0].restarts == 0


@pytest.mark.parametrize("how", ["hang", "hold"])
async def test_a_hung_kernel_ends_its_process(ray_cluster: Any, how: str) -> None:
    """Whether it holds the interpreter or not: callers get an error in time, the next life serves."""
    async with opened(hang_s=3.0) as fleet:
        await fleet.run(hosted.plant, how)
        neighbour = asyncio.ensure_future(fleet.run(hosted.linger, "neighbour", 60.0))
        await running(fleet, "neighbour")
        with pytest.raises(lz.DeviceLostError, match=r"run for|no sign of life") as hung:
            await fleet.run(hosted.norm, 3, on="gpu-0")
        assert not hung.value.retryable
        with pytest.raises(lz.DeviceLostError):
            await neighbour
        assert (await fleet.run(hosted.norm, 3))[0]


async def test_a_sticky_fault_ends_the_process_and_blames_the_last_kernel(ray_cluster: Any) -> None:
    """An error after which every call would fail is answered as a lost device; the next life serves."""
    async with opened() as fleet:
        before = fleet.devices["gpu-0"].facts.pid
        with pytest.raises(lz.DeviceLostError, match="illegal memory access"):
            await fleet.run(hosted.faulty, on="gpu-0")
        for _ in range(400):
            if fleet.devices["gpu-0"].facts.pid != before:
                break
            await asyncio.sleep(0.05)
        assert (await fleet.run(hosted.norm, 3))[0]
        assert fleet.devices["gpu-0"].facts.pid != before


async def test_a_crash_loop_is_broken(ray_cluster: Any) -> None:
    """After `max_restarts` deaths the device stays down, and says why."""
    async with opened(max_restarts=1) as fleet:
        for _ in range(2):
            with pytest.raises(lz.DeviceLostError):
                await fleet.run(hosted.exit_now, on="gpu-0")
        for _ in range(100):
            if fleet.devices["gpu-0"].state is DeviceState.DEAD:
                break
            await asyncio.sleep(0.05)
        with pytest.raises(lz.DeviceLostError, match="max_restarts=1"):
            await fleet.run(hosted.add, 1, on="gpu-0")
        with pytest.raises(lz.DeviceLostError, match="no device takes calls"):
            await fleet.run(hosted.add, 1)


async def test_rolling_restart_under_load_fails_nobody(ray_cluster: Any) -> None:
    """Every device is in a new life, every call was answered."""
    async with opened(devices=2) as fleet:
        before = {facts.name: facts.generation for facts in fleet.facts}
        stop = asyncio.Event()
        answers = 0

        async def client() -> None:
            nonlocal answers
            while not stop.is_set():
                assert await fleet.run(hosted.add, 1) == 2
                answers += 1
                await asyncio.sleep(0.01)

        clients = [asyncio.ensure_future(client()) for _ in range(8)]
        await fleet.rolling_restart()
        stop.set()
        await asyncio.gather(*clients)
        assert answers > 8
        assert all(facts.generation != before[facts.name] for facts in fleet.facts)


async def test_a_tensor_moves_from_device_to_device(ray_cluster: Any) -> None:
    """Shipped between two devices without passing through the caller; errors of lost tensors are named."""
    async with opened(devices=2) as fleet:
        tensor = torch.randn(8, 4)
        there = await fleet.ship(tensor, to="gpu-0")
        moved = await fleet.ship(there, to="gpu-1")
        assert moved.device == "gpu-1"
        assert torch.equal(await fleet.fetch(moved), tensor)
        with pytest.raises(ValueError, match=r"fleet\.ship"):
            await fleet.run(hosted.total, there, on="gpu-1")
        await fleet.devices["gpu-0"].restart()
        with pytest.raises(lz.DeviceLostError, match="earlier life"):
            await fleet.ship(there, to="gpu-1")


async def test_what_cannot_travel_is_named(ray_cluster: Any) -> None:
    """Arguments on the way there, results and exceptions on the way back."""
    async with opened() as fleet:
        with pytest.raises(TypeError, match="travel"):
            await fleet.run(hosted.total, threading.Lock())
        with pytest.raises(TypeError, match="the result, lock, cannot travel"):
            await fleet.run(hosted.a_lock)
        with pytest.raises(RuntimeError, match="OddError: odd"):
            await fleet.run(hosted.fail, "odd")


async def test_a_forked_child_is_told_so(ray_cluster: Any) -> None:
    """The child cannot use the parent's devices, its own works, and collecting handles calls nobody."""
    async with opened() as fleet:
        reader, writer = os.pipe()
        (name,) = ray_cluster.util.list_named_actors()
        ring: list[Any] = [ray_cluster.get_actor(name), ray_cluster.put(1)]
        ring.append(ring)
        del ring
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Python 3.12 warns of a fork with threads, which this test is about
            child = os.fork()
        if child == 0:
            verdict = b"wrong"
            try:
                coroutine = fleet.run(hosted.add, 1)
                try:
                    coroutine.send(None)
                except lz.RuntimeClosedError as error:
                    gc.collect()
                    fine = not ray_cluster.is_initialized()
                    fine &= bool(torch.isfinite(lz.sync.rms_norm(torch.ones(2, 8))).all())
                    verdict = b"right" if fine and "forked" in str(error) else b"no op"
            finally:
                os.write(writer, verdict)
                os._exit(0)
        os.close(writer)
        said = await asyncio.to_thread(os.read, reader, 16)
        os.close(reader)
        os.waitpid(child, 0)  # noqa: ASYNC222  it has written its last
        assert said == b"right"
        assert await fleet.run(hosted.add, 1) == 2


async def test_a_device_leaves_nothing_behind(ray_cluster: Any) -> None:
    """After close: no actor, no place taken, no journal, no socket's folder."""
    async with opened() as fleet:
        pid = fleet.devices["gpu-0"].facts.pid
        socket = fleet.devices["gpu-0"].address.path  # type: ignore[attr-defined]
        assert socket in Path("/proc/net/unix").read_text()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            break
        await asyncio.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert socket not in Path("/proc/net/unix").read_text()
    journals = Path(tempfile.gettempdir()) / f"layerzero-{os.getuid()}"
    assert [p for p in journals.rglob("*.journal") if str(pid) in p.name] == []
    for _ in range(200):  # Ray's view of what is free lags behind
        if ray_cluster.available_resources().get("GPU") == 2.0:
            break
        await asyncio.sleep(0.05)
    assert ray_cluster.available_resources().get("GPU") == 2.0
