"""Where a call without a device of its own goes: moves, waits and their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from layerzero.actors.remote.losses import MAX_BEGUN
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.rpc.client import DeviceState
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError, RuntimeClosedError
from tests.waiting import LIMIT_S, within

pytestmark = pytest.mark.asyncio

RUNNING, RESTARTING, DEAD = DeviceState.RUNNING, DeviceState.RESTARTING, DeviceState.DEAD


class Port:
    """A device whose state the test sets; `script` says what its calls raise, one after another."""

    def __init__(self, name: str, state: DeviceState = RUNNING, *script: Exception) -> None:
        self.name = name
        self.load = 0
        self.state = self.after = state
        self.script = list(script)
        self.calls: list[float | None] = []
        self.changed = asyncio.Event()

    def become(self, state: DeviceState) -> None:
        self.state = state
        self.changed.set()

    async def wait_until_serving(self) -> None:
        while self.state not in (RUNNING, DEAD):
            self.changed.clear()
            await self.changed.wait()

    async def run(self, fn: Any, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> str:
        self.calls.append(timeout_s)
        if self.state is not RUNNING:
            raise DeviceLostError(f"{self.name} is {self.state.value}", retryable=True)
        if self.script:
            self.state = self.after
            raise self.script.pop(0)
        return self.name

    async def stream(
        self, fn: Any, *args: Any, so_far: list[int] | None = None, **kwargs: Any
    ) -> AsyncIterator[int]:
        self.calls.append(None)
        yield len(so_far or ())
        if self.script:
            raise self.script.pop(0)

    async def forward(
        self, take: Callable[[int], None], fn: Any, *args: Any, so_far: list[int] | None = None, **kwargs: Any
    ) -> None:
        async for item in self.stream(fn, so_far=so_far):
            take(item)


def device_pool(*ports: Any, patience_s: float = LIMIT_S) -> DevicePool:
    return DevicePool({port.name: port for port in ports}, patience_s=patience_s)


def begun(times: int) -> list[Exception]:
    return [DeviceLostError("lost while it ran", retryable=False) for _ in range(times)]


async def test_a_call_ends_where_no_device_comes_back() -> None:
    """Without `on` and without a limit: within the patience, retryable, with the state of each device."""
    ports = Port("a", RESTARTING), Port("b", DEAD)
    with pytest.raises(
        DeviceLostError, match=r"placement_timeout_s=0\.05: a is restarting, b is dead"
    ) as lost:
        await within(device_pool(*ports, patience_s=0.05).run(print))
    assert lost.value.retryable


async def test_a_call_goes_to_the_first_device_that_comes_back() -> None:
    """Whichever it is; none is asked before."""
    for back in (0, 1):
        ports = Port("a", RESTARTING), Port("b", RESTARTING)
        call = asyncio.ensure_future(device_pool(*ports).run(print))
        for _ in range(9):
            await asyncio.sleep(0)
        ports[back].become(RUNNING)
        assert await within(call) == ports[back].name
        assert [len(port.calls) for port in ports] == [1 - back, back]


async def test_a_call_ends_when_the_last_device_is_given_up() -> None:
    """Who waits for it hears so; also that the pool was closed meanwhile."""
    for closes, kind in ((False, DeviceLostError), (True, RuntimeClosedError)):
        port = Port("a", RESTARTING)
        one = device_pool(port)
        call = asyncio.ensure_future(one.run(print))
        for _ in range(9):
            await asyncio.sleep(0)
        one._closed = closes
        port.become(DEAD)
        with pytest.raises(kind, match=r"no device takes calls: a is dead|closed"):
            await within(call)


async def test_a_limit_holds_over_all_devices_of_a_call() -> None:
    """A move does not begin it anew."""
    second = Port("b")
    assert (
        await device_pool(Port("a", RUNNING, *begun(1)), second).run(print, timeout_s=50.0, idempotent=True)
        == "b"
    )
    assert second.calls[0] is not None and second.calls[0] < 50.0
    with pytest.raises(DeadlineExceededError, match="a is restarting"):
        await device_pool(Port("a", RESTARTING)).run(print, timeout_s=0.01)


async def test_a_poisoned_call_begins_three_times_in_all() -> None:
    """On whichever devices; one that may not run again begins once; an error of its own moves nothing."""
    ports = [Port(name, RUNNING, *begun(9)) for name in "abcde"]
    with pytest.raises(DeviceLostError, match="not run again") as lost:
        await device_pool(*ports).run(print, idempotent=True)
    assert not lost.value.retryable
    assert sum(len(port.calls) for port in ports) == MAX_BEGUN == 3
    with pytest.raises(DeviceLostError, match="while it ran"):
        await device_pool(*ports).run(print)
    assert sum(len(port.calls) for port in ports) == 4
    own = DeviceLostError("its own", retryable=True)
    own.context = {"hosted_on": "f"}
    port = Port("f", RUNNING, own)
    with pytest.raises(DeviceLostError, match="its own"):
        await device_pool(port, Port("g")).run(print, idempotent=True)
    last = Port("h", RUNNING, *begun(1))
    last.after = DEAD
    with pytest.raises(DeviceLostError, match="h is dead") as lost:
        await device_pool(last).run(print, idempotent=True)
    assert not lost.value.retryable


async def test_a_stream_that_gets_on_may_lose_any_number_of_devices() -> None:
    """Only losses without an item between them count."""
    items = device_pool(Port("a", RUNNING, *begun(8))).stream(print, resume=True)
    assert [item async for item in items] == list(range(9))
    got: list[int] = []
    await device_pool(Port("b", RUNNING, *begun(8))).forward(got.append, print, resume=True)
    assert got == list(range(9))
    with pytest.raises(DeviceLostError, match="lost while it ran"):
        await device_pool(Port("c", RUNNING, *begun(1))).forward(got.append, print)


async def test_a_function_takes_one_of_the_devices_that_serve_again_after_each_loss() -> None:
    """It sees no device that does not run, and none that has just lost the call; `device` asks it as well."""
    seen: list[list[str]] = []

    def last(serving: Any) -> Any:
        seen.append([each.name for each in serving])
        return serving[-1]

    lost = DeviceLostError("gone", retryable=True)
    ports = Port("a"), Port("b", RUNNING, lost), Port("c", RESTARTING)
    pool = device_pool(*ports)
    assert await pool.run(len, on=last) == "a"
    assert seen == [["a", "b"], ["a"]]
    assert [item async for item in pool.stream(len, on=last, resume=True)] == [0]
    assert pool.device(last) is ports[1]
