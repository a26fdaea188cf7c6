"""One life as its client knows it: which requests it lets begin."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.actors.remote.ray_actor import DeviceSpec
from layerzero.actors.remote.restarts import ActorIncarnation
from layerzero.actors.remote.supervised import SupervisedDevice
from layerzero.actors.rpc.client import DeviceState
from layerzero.actors.rpc.frames import Address
from layerzero.spec.errors import DeviceLostError
from layerzero.spec.settings import Settings

pytestmark = pytest.mark.asyncio

THERE: Any = SimpleNamespace(peer_closed=False)
GONE: Any = SimpleNamespace(peer_closed=True)


def life() -> ActorIncarnation:
    """A life without a channel."""
    return ActorIncarnation("generation", Address("", "127.0.0.1", 0, "node", b""))


async def test_only_what_is_waited_for_may_begin() -> None:
    """What nobody sent, or was cancelled or answered, begins no more; what may have begun is remembered."""
    one = life()
    assert not one.begin(0, THERE)
    number = one.numbers.new_number()
    assert one.begin(number, THERE)
    assert number in one.started
    one.numbers.ack(number)
    assert not one.begin(number, THERE)


async def test_a_life_that_is_over_lets_nothing_begin() -> None:
    """Its requests go to the next one; so does one whose leave would reach nobody."""
    one = life()
    number = one.numbers.new_number()
    assert not one.begin(number, GONE)
    one.end("a test")
    assert not one.begin(number, THERE)
    assert one.started == set()


@pytest.mark.parametrize("when", ["it serves", "it restarts"])
async def test_a_device_that_was_drained_takes_no_calls_after_a_crash(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Until it is restarted: who took it out of service for a reason is not overruled by a crash."""
    spec = DeviceSpec(pool="pool", name="cpu-0", settings=Settings(), opener="", secret=b"")
    device = SupervisedDevice(spec, lambda: None, node="node")
    lives, may_begin, again = [life(), life(), life()], asyncio.Event(), asyncio.Event()
    device.state, coming = DeviceState.RESTARTING, iter(lives)

    async def begin() -> ActorIncarnation:
        await may_begin.wait()
        device._incarnation = next(coming)
        return device._incarnation

    async def done(*_: object) -> bool:
        return True

    async def watch(incarnation: ActorIncarnation) -> None:
        if incarnation is lives[1]:
            again.set()

    monkeypatch.setattr(device, "_begin_incarnation", begin)
    monkeypatch.setattr(device, "_watch", watch)
    for name in ("_request_drain", "_request_leave", "_wait_for_answers"):
        monkeypatch.setattr(device, name, done)
    monkeypatch.setattr(device, "_kill", lambda restart: None)
    device._supervisor = asyncio.create_task(device._supervise())
    if when == "it restarts":
        await device.drain(1.0)
    may_begin.set()
    await device.wait_until_serving()
    if when == "it serves":
        await device.drain(1.0)
        lives[0].end("its process has gone")
        await again.wait()
    assert device.state is DeviceState.DRAINING
    with pytest.raises(DeviceLostError, match="draining; nothing ran"):
        await device._serving_incarnation(None)
    await device.restart(drain_s=0.1)
    assert device.state is DeviceState.RUNNING
    await device.close()


async def test_a_device_that_crashes_while_it_is_to_restart_has_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The crash counts, the process behind it is not killed, and the next crash is no planned restart."""
    spec = DeviceSpec(pool="pool", name="cpu-0", settings=Settings(), opener="", secret=b"")
    device = SupervisedDevice(spec, lambda: None, node="node")
    first, second, killed = life(), life(), []

    def begun(one: ActorIncarnation) -> None:
        device._incarnation, device.state = one, DeviceState.RUNNING
        device._serving.set()

    async def crash(timeout_s: float) -> bool:
        first.end("its process has gone")
        assert device._note_end("its process has gone")
        asyncio.get_running_loop().call_soon(begun, second)
        return False

    begun(first)
    monkeypatch.setattr(device, "_request_drain", crash)
    monkeypatch.setattr(device, "_kill", lambda restart: killed.append(restart))
    await device.restart(drain_s=0.1)
    assert device._incarnation is second and killed == []
    for _ in range(spec.settings.max_restarts - 1):
        assert device._note_end("again")
    assert not device._note_end("too often") and device.state is DeviceState.DEAD
