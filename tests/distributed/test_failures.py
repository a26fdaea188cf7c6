"""Devices that die of a kernel, that hang, that find no place: what their callers and the next life see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero.actors.remote.gpu_claims import GpuClaim
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.rpc.client import DeviceState
from tests.distributed import hosted
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.ray, pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[DevicePool]:
    one = lz.Settings(
        cluster="auto", cluster_devices=1, device="cpu", placement_timeout_s=LIMIT_S, perfdb=None,
        shipped_tables=False, **settings,
    )  # fmt: skip
    async with lz.start(one) as runtime:
        yield runtime.device_pool


async def decided(device_pool: DevicePool) -> set[str]:
    """What the device has decided; for which kernel, the prices of each life say.

    A kernel that has been loaded, and prices that have been read, make a table in which nothing is decided
    before the next call: where that came in between, a call is made, and it is looked again.
    """
    found: set[str] = set()

    async def look() -> bool:
        nonlocal found
        found = {line.rpartition(" ")[0] for line in await device_pool.run(hosted.decided)}
        if not found:
            await device_pool.run(hosted.norm, 3, idempotent=True)
        return bool(found)

    await until(look)
    return found


async def test_two_deaths_quarantine_the_kernel_in_flight(ray_cluster: Any, tmp_path: Path) -> None:
    """The journal blames it, the second death takes it out, another kernel answers, a later process knows.

    A death more than `max_restarts` is the last: the device stays down, and says why.
    """
    async with opened(state_dir=str(tmp_path), max_restarts=2) as device_pool:
        device = device_pool.devices["gpu-0"]
        assert (await device_pool.run(hosted.norm, 3))[0]
        before = await decided(device_pool)
        await until(lambda: len(device._spec.decided) >= len(before))  # type: ignore[attr-defined]
        await device_pool.prepare(hosted.plant, "die")
        right, kernel = await device_pool.run(hosted.norm, 4, idempotent=True)
        assert right
        assert not kernel.startswith("planted")
        assert (await device_pool.health())[0].restarts == 2
        assert await device_pool.run(hosted.quarantined) == ["planted.rms_norm.die"]

        async def kept() -> bool:
            if before <= await decided(device_pool):
                return True
            await device_pool.run(hosted.norm, 3, idempotent=True)  # as above
            return False

        await until(kept)
        with pytest.raises(lz.DeviceLostError):
            await device_pool.run(hosted.exit_now, on="gpu-0")
        await until(lambda: device.state is DeviceState.DEAD)
        with pytest.raises(lz.DeviceLostError, match="max_restarts=2"):
            await device_pool.run(hosted.add, 1, on="gpu-0")
        with pytest.raises(lz.DeviceLostError, match="no device takes calls"):
            await device_pool.run(hosted.add, 1)
    assert [path.name.split("@")[0] for path in tmp_path.glob("*.json")] == [  # noqa: ASYNC240  a look
        "planted.rms_norm.die"
    ]
    async with opened(state_dir=str(tmp_path)) as device_pool:
        await device_pool.prepare(hosted.plant, "die")
        assert (await device_pool.run(hosted.norm, 3))[0]
        assert (await device_pool.health())[0].restarts == 0


async def test_a_hung_kernel_ends_its_process(ray_cluster: Any) -> None:
    """Whether it holds the interpreter or not: callers get an error in time, the next life serves."""
    async with opened(hang_s=4.0) as device_pool:
        for how in ("hang", "hold"):
            await device_pool.run(hosted.plant, how)
            neighbour = asyncio.ensure_future(device_pool.run(hosted.linger, "neighbour", 600.0))

            async def running() -> bool:
                return "neighbour began" in await device_pool.run(hosted.events)

            await until(running)
            with pytest.raises(lz.DeviceLostError, match=r"run for|no heartbeat") as hung:
                await device_pool.run(hosted.norm, 3, on="gpu-0")
            assert not hung.value.retryable
            with pytest.raises(lz.DeviceLostError):
                await neighbour
            assert (await device_pool.run(hosted.norm, 3))[0]


@pytest.mark.parametrize("on", [None, pytest.param("gpu-0", marks=pytest.mark.slow)])
async def test_a_poisoned_call_ends_and_its_device_comes_back(
    ray_cluster: Any, tmp_path: Path, on: str | None
) -> None:
    """An idempotent call that ends its process runs three times and is not retryable; so does a stream.

    A device that has died too often for it is revived by a restart, and serves.
    """
    path = tmp_path / "executed"
    async with opened() as device_pool:
        with pytest.raises(lz.DeviceLostError, match="not run again") as lost:
            await device_pool.run(hosted.poison, str(path), 7, on=on, idempotent=True)
        assert not lost.value.retryable
        assert path.read_text().split() == ["7"] * 3
        assert await device_pool.run(hosted.add, 1, on=on) == 2
        path.unlink()
        got = []
        with pytest.raises(lz.DeviceLostError, match=r"times|not run again") as stream:
            async for item in device_pool.stream(hosted.poisoned, str(path), on=on, resume=True):
                got.append(item)
        assert not stream.value.retryable
        assert got == [0, 1, 2]
        assert 2 <= len(path.read_text().split()) <= 4
        device = device_pool.devices["gpu-0"]
        while device.state is not DeviceState.DEAD:
            with pytest.raises(lz.DeviceLostError) as last:
                await device_pool.run(hosted.poison, str(path), 8, on=on, idempotent=True)
            assert not last.value.retryable or device.state is DeviceState.DEAD
        await device_pool.rolling_restart()
        assert device.state is DeviceState.RUNNING
        assert await device_pool.run(hosted.add, 1, on=on) == 2


@pytest.mark.parametrize("on", [None, pytest.param("gpu-0", marks=pytest.mark.slow)])
async def test_an_idempotent_call_runs_again_after_a_fault_of_its_device(
    ray_cluster: Any, tmp_path: Path, on: str | None
) -> None:
    """A fault that the process reported is a loss like its death; an error of the code's own is none."""
    path = tmp_path / "executed"
    async with opened() as device_pool:
        assert await device_pool.run(hosted.faulty_once, str(path), on=on, idempotent=True) == 2
        with pytest.raises(lz.DeviceLostError, match="that this code uses") as lost:
            await device_pool.run(hosted.lose_another, on=on, idempotent=True)
        assert lost.value.retryable


@pytest.mark.long
async def test_a_gpu_that_another_device_has_is_refused_and_shared_by_setting(ray_cluster: Any) -> None:
    """A device of another cluster holds one of two GPUs alone: the error names both, and no restart is tried.

    Where two may share a GPU, four devices serve on two of them.
    """
    node = ray_cluster.get_runtime_context().get_node_id()
    settings = lz.Settings(cluster="auto", device="cpu", perfdb=None, placement_timeout_s=LIMIT_S)
    other = GpuClaim(f"{node}-1", "gpu-5 of pool other", 1)
    other.acquire()
    try:
        with pytest.raises(lz.ConfigurationError, match=r"gpu-\d of pool .*gpu-5 of pool other") as refused:
            async with lz.start(settings, scoped=True):
                pass
        assert refused.value.context["reason"] is lz.Reason.GPU_TAKEN
    finally:
        other.release()
    async with lz.start(
        settings.replace(cluster_devices_per_gpu=2, cluster_devices=3), scoped=True
    ) as runtime:
        assert sorted(runtime.device_pool.devices) == ["gpu-0", "gpu-1", "gpu-2"]
        assert await runtime.device_pool.run(hosted.add, 1, on="gpu-2") == 2
        with pytest.raises(lz.ConfigurationError, match=r"gpu-\d of pool"):
            GpuClaim(f"{node}-0", "alone", 1).acquire(0.1)


async def test_pending_placement_is_an_error_that_says_what_is_there(ray_cluster: Any) -> None:
    """Never a silent wait: the message names what was asked, what there is, and the setting."""
    settings = lz.Settings(cluster="auto", cluster_devices=9, device="cpu", placement_timeout_s=1.0)
    with pytest.raises(lz.ConfigurationError, match=r"9 x 1 GPU.*2 GPU.*cluster_devices"):
        async with lz.start(settings, scoped=True):
            pass
