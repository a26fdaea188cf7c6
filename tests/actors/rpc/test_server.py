"""A device's side of requests: each runs once, and how it ended says who ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from layerzero.actors.rpc.server import CallServer, RequestHeader
from layerzero.actors.rpc.settling import result_of
from layerzero.spec.errors import DeviceLostError


class Work:
    """What a request runs: it counts its runs, and waits where it is told to."""

    def __init__(self, waits: bool = False) -> None:
        self.runs, self.waits = 0, waits
        self.entered = asyncio.Event()

    async def __call__(self) -> int:
        self.runs += 1
        self.entered.set()
        if self.waits:
            await asyncio.Event().wait()
        return self.runs


def served(server: CallServer, number: int, work: Callable[[], Awaitable[Any]], **more: Any) -> Any:
    """A request as a task, of the first client."""
    named = {"ack_watermark": 0, "incarnation": server.incarnation, **more}
    return asyncio.ensure_future(server.serve(RequestHeader("client", number, **named), work))


@pytest.mark.asyncio
async def test_a_copy_gets_the_answer_of_the_one_run() -> None:
    """While it runs, behind its end and while the device drains; what was settled never runs again."""
    device: Any = None
    server, work = CallServer(device, "gpu-0"), Work()
    first, copy = served(server, 0, work), served(server, 0, work)
    assert [(await first).value, (await copy).value, work.runs] == [1, 1, 1]
    assert await server.drain(0.0)
    assert (await served(server, 0, work)).value == 1
    assert (await served(server, 1, work)).status == "draining"
    assert (await served(server, 0, work, ack_watermark=1)).status == "settled"
    assert (await served(server, 2, work, incarnation="before")).status == "stale"
    assert work.runs == 1


@pytest.mark.asyncio
async def test_who_ended_a_call_is_told_apart() -> None:
    """A drain cuts calls off, a caller cancels its own: one device is lost, the other caller has gone."""
    device: Any = None
    server = CallServer(device, "gpu-0")
    works = [Work(waits=True), Work(waits=True)]
    cut, cancelled = (served(server, number, work) for number, work in enumerate(works))
    for work in works:
        await work.entered.wait()
    assert server.in_flight == 2
    server.cancel("client", 1)
    assert (await cancelled).status == "cancelled"
    with pytest.raises(asyncio.CancelledError):
        result_of(await cancelled, "gpu-0")
    assert not await server.drain(0.0)
    assert (await cut).status == "cut"
    with pytest.raises(DeviceLostError, match="was drained") as raised:
        result_of(await cut, "gpu-0")
    assert not raised.value.retryable
    assert [work.runs for work in works] == [1, 1]
