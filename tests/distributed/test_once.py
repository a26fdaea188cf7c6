"""A call that is not idempotent runs once at most: notes that nobody read, cut networks, late copies.

What such a copy carries is little.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import layerzero as lz
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.remote.ray_device import RayDevice
from layerzero.actors.rpc.client import DeviceState
from layerzero.actors.rpc.server import CallOutcome
from tests.distributed import hosted
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

READ_S = 1.0  # what the devices need to begin calls, and to die


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device_pool(ray_cluster: Any) -> AsyncIterator[DevicePool]:
    """One device, which may die as often as the tests want."""
    settings = lz.Settings(
        cluster="auto", cluster_devices=1, device="cpu", max_restarts=100, placement_timeout_s=LIMIT_S
    )
    async with lz.start(settings) as runtime:
        yield runtime.device_pool


def only(device_pool: DevicePool) -> RayDevice:
    """The device, as what it is."""
    device = device_pool.devices["gpu-0"]
    assert isinstance(device, RayDevice)
    return device


def executions(path: Path) -> list[int]:
    """The keys that were written down, one for each execution."""
    return sorted(map(int, path.read_text().split())) if path.exists() else []


async def settled(calls: list[asyncio.Task[int]]) -> list[int]:
    """The keys of the calls that were answered; the others were lost after they began.

    A call that was not lost so has an answer: one that had not begun ran in the next life.
    """
    answered = []
    for key, result in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        if isinstance(result, lz.DeviceLostError):
            assert not result.retryable
        else:
            assert result == key
            answered.append(key)
    return answered


async def sent_while_nobody_reads(device: RayDevice, path: Path) -> list[asyncio.Task[int]]:
    """Calls that are on the device while the loop of their caller stands still."""
    calls = [asyncio.ensure_future(device.run(hosted.mark, str(path), key, 3.0)) for key in range(8)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stand_still()
    return calls


def stand_still() -> None:
    """Read nothing of what the devices write."""
    time.sleep(READ_S)


async def test_a_neighbour_that_writes_first_loses_no_note(device_pool: DevicePool, tmp_path: Path) -> None:
    """A device is killed, and a cancelled neighbour meets the end of the channel before anybody reads it."""
    device, path = only(device_pool), tmp_path / "executed"
    neighbour = asyncio.ensure_future(device_pool.run(hosted.linger, "neighbour", 600.0))

    async def began() -> bool:
        return "neighbour began" in await device_pool.run(hosted.events)

    await until(began)
    calls = await sent_while_nobody_reads(device, path)
    os.kill(device.facts.pid, signal.SIGKILL)
    stand_still()
    neighbour.cancel()
    answered = await settled(calls)
    ran = executions(path)
    assert len(set(ran)) == len(ran)
    assert set(answered) <= set(ran)


async def test_a_life_that_is_given_up_takes_no_call_that_it_told_nobody_of(
    device_pool: DevicePool, tmp_path: Path
) -> None:
    """The watchdog ends a life whose last notes lie unread; what they told of does not run again."""
    device, path = only(device_pool), tmp_path / "executed"
    assert await device.run(hosted.add, 1) == 2
    calls = await sent_while_nobody_reads(device, path)
    assert device._incarnation is not None
    device._hang(device._incarnation, "sent no heartbeat, says a test")
    answered = await settled(calls)
    ran = executions(path)
    assert len(set(ran)) == len(ran)
    assert set(answered) <= set(ran)


class LateAnswers:
    """An actor whose first answer is lost on the way; that to a copy says that it reached the next life."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.copies = 0
        self.serve, self.start = self, actor.start  # a restart may begin before the test takes this away

    def remote(self, *request: Any) -> Any:
        """Carry a request."""
        answer = asyncio.get_running_loop().create_future()
        self.copies += 1
        if self.copies == 1:
            self.first = self._actor.serve.remote(*request)
        else:
            answer.set_result(CallOutcome("stale", detail="generation 0 has ended"))
        return answer


async def test_a_copy_that_reached_the_next_life_does_not_repeat_what_began_in_the_last(
    device_pool: DevicePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "That life is over", the answer to a copy, says nothing of the first one, which had begun."""
    device, path = only(device_pool), tmp_path / "executed"
    assert await device.run(hosted.add, 1) == 2
    monkeypatch.setattr(device, "actor", LateAnswers(device.actor))
    call = asyncio.ensure_future(device.run(hosted.mark, str(path), 0))
    await until(lambda: executions(path))
    await until(lambda: call.done() or device.state is not DeviceState.RUNNING)
    monkeypatch.undo()
    with pytest.raises(lz.DeviceLostError, match="it had started") as lost:
        await call
    assert not lost.value.retryable
    assert executions(path) == [0]
    os.kill(device.facts.pid, signal.SIGKILL)  # it lives, and its client has left it
    assert await device.run(hosted.add, 1) == 2


class SlowAnswers:
    """An actor whose answers take a while, and what went through its messages in bytes."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.serve = self
        self.copies = 0
        self.carried = 0

    def remote(self, *request: Any) -> Any:
        """Carry a request."""
        self.copies += 1
        self.carried += sum(len(part) for part in request if isinstance(part, bytes))
        return self._answer(self._actor.serve.remote(*request))

    async def _answer(self, ref: Any) -> CallOutcome:
        outcome: CallOutcome = await ref
        if isinstance(outcome.value, bytes):
            self.carried += len(outcome.value)
        await asyncio.sleep(READ_S)
        return outcome


async def test_a_long_value_travels_once(device_pool: DevicePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is not lost: copies of a message that is late carry neither the argument nor the result again."""
    device, size = only(device_pool), 32 << 20
    await device.run(hosted.forget)
    hosted.COUNTS.clear()
    still = asyncio.ensure_future(device.run(hosted.stand_still, 2 * READ_S))
    assert device._incarnation is not None
    life = device._incarnation
    await until(lambda: life.started and not life.silent(max(life.started)))
    messages = SlowAnswers(device.actor)
    monkeypatch.setattr(device, "actor", messages)
    answer = await device.run(hosted.heavier, hosted.Heavy(size), 1)
    monkeypatch.undo()
    assert answer.size == size + 1
    assert messages.copies > 2
    assert messages.carried < size // 100
    assert hosted.COUNTS == {"packed": 1, "unpacked": 1}
    there = await device.run(hosted.counts)
    assert (there["packed"], there["unpacked"]) == (1, 1)
    await still


async def test_short_values_stay_in_their_message(
    device_pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detour by the object store would cost them a round trip."""
    device = only(device_pool)
    messages = SlowAnswers(device.actor)
    monkeypatch.setattr(device, "actor", messages)
    assert (await device.run(hosted.heavier, hosted.Heavy(10_000), 1)).size == 10_001
    monkeypatch.undo()
    assert messages.carried > 20_000
