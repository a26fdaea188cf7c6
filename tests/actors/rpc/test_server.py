"""A device's side of requests: each runs once, and how it ended says who ended it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerzero.actors.rpc import server as rpc_server
from layerzero.actors.rpc.client import DeviceState
from layerzero.actors.rpc.server import CallServer, RequestHeader
from layerzero.actors.rpc.settling import result_of
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError


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
    assert server.in_flight == 0
    assert (await cut).status == "cut"
    with pytest.raises(DeviceLostError, match="was drained") as raised:
        result_of(await cut, "gpu-0")
    assert not raised.value.retryable
    assert [work.runs for work in works] == [1, 1]


@pytest.mark.asyncio
async def test_what_a_client_has_is_forgotten() -> None:
    """Answers that a later request settles are kept no longer, and their requests never run again."""
    device: Any = None
    server, work = CallServer(device, "gpu-0"), Work()
    for number in range(3):
        await served(server, number, work)
    await served(server, 3, work, acked=(0, 2))
    assert len(list(server.idempotency_log.entries())) == 2
    assert [(await served(server, number, work)).status for number in (0, 1, 2)] == [
        "settled",
        "done",
        "settled",
    ]
    assert work.runs == 4


@pytest.mark.asyncio
async def test_whose_time_limit_it_was_is_told() -> None:
    """The request's own limit names the device; a limit inside of the hosted code is an error like others."""
    device: Any = None
    server, work = CallServer(device, "gpu-0"), Work(waits=True)
    late = await served(server, 0, work, timeout_s=0.0)
    assert late.status == "failed" and "timeout_s=0 on 'gpu-0'" in str(late.value)

    async def own(error: Exception) -> None:
        raise error

    for number, error in enumerate((TimeoutError("own"), DeadlineExceededError("own")), 1):
        timeout_s = None if number == 1 else 60.0
        outcome = await served(server, number, partial(own, error), timeout_s=timeout_s)
        assert (outcome.status, outcome.value) == ("failed", error)


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_hosted_code_does_not_end_its_process(error: BaseException) -> None:
    """Let through, it would end the loop on which its caller waits."""
    device: Any = None
    server = CallServer(device, "gpu-0")

    async def leave() -> None:
        raise error

    outcome = await served(server, 0, leave)
    assert outcome.status == "failed" and type(outcome.value) is RuntimeError
    assert f"hosted code raised {error!r}" in str(outcome.value)
    assert server.state is DeviceState.RUNNING


@pytest.mark.asyncio
async def test_a_broken_device_takes_no_more_requests_and_names_its_suspects() -> None:
    """What ran when it broke is suspected before the process ends."""
    marked: list[bool] = []
    journal = SimpleNamespace(mark_suspects=lambda: marked.append(True))
    device: Any = SimpleNamespace(kernel_calls=SimpleNamespace(running_log=journal))
    server = CallServer(device, "gpu-0")

    async def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    lost = await served(server, 0, broken)
    assert (lost.status, lost.value.retryable, marked) == ("lost", False, [True])
    assert (await served(server, 1, Work())).status == "draining"


class Adds:
    """An object that is called, and awaited; it wants tensors."""

    async def __call__(self, x: torch.Tensor, *, y: torch.Tensor) -> float:
        assert asyncio.get_running_loop()
        return float((x + y).sum())


def stops() -> None:
    """What no future takes."""
    raise StopIteration(5)


@pytest.mark.asyncio
async def test_handles_are_tensors_in_hosted_code() -> None:
    """By position and by name, in calls and in streams; an awaited object runs on the loop."""
    device: Any = None
    server = CallServer(device, "gpu-0")
    two = server.tensor_store.add(torch.full((2,), 2.0))
    assert await server.invoke(Adds(), (two,), {"y": two}) == 8.0
    closed: list[int] = []

    async def items(x: torch.Tensor, *, y: torch.Tensor) -> AsyncIterator[float]:
        try:
            for _ in range(3):
                yield float((x + y).sum())
        finally:
            closed.append(1)

    emitted: list[float] = []

    async def emit(item: float) -> None:
        emitted.append(item)
        if len(emitted) == 2:
            raise ConnectionError("the reader has gone")

    with pytest.raises(ConnectionError):
        await server.emit(items, (two,), {"y": two}, emit)
    assert (emitted, closed) == ([8.0, 8.0], [1])
    with pytest.raises(RuntimeError, match="stops raised StopIteration"):
        await asyncio.wait_for(server.invoke(stops, (), {}), 60)


@pytest.mark.asyncio
async def test_decisions_are_told_once_each_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has received some is told the rest; a decision made twice is one."""
    monkeypatch.setattr(rpc_server, "MAX_DECIDED", 3)
    device: Any = None
    server = CallServer(device, "gpu-0")
    requests: list[Any] = [SimpleNamespace(op=f"op{number}") for number in range(5)]
    for request in (requests[0], requests[1], requests[0]):
        server.on_decided(request)
    assert server.decided_requests() == requests[:2]
    for request in requests[2:]:
        server.on_decided(request)
    assert server.decided_requests(2) == requests[2:3]


@pytest.mark.asyncio
async def test_the_last_kernel_of_an_op_stays() -> None:
    """A suspect is quarantined while another kernel serves its op; one that is out already is out again."""
    blocked: dict[str, str] = {}
    kernels = {name: SimpleNamespace(id=name, op="op") for name in ("a", "b")}
    device: Any = SimpleNamespace(
        registry=SimpleNamespace(get=kernels.get, blocked=dict, for_op=lambda op: list(kernels.values())),
        health=SimpleNamespace(quarantine=blocked.__setitem__, blocked_kernels=lambda: blocked),
    )
    server = CallServer(device, "gpu-0")
    assert server.quarantine(["a", "b", "unknown"], "why") == ["a", "unknown"]
    assert server.quarantine(["a"], "again") == ["a"]
    assert blocked == {"a": "again", "unknown": "why"}
    blocked["b"] = "its library is gone"
    assert server.quarantine(["a"], "a third time") == ["a"]


@pytest.mark.asyncio
async def test_a_reader_that_goes_leaves_the_run_to_the_others() -> None:
    """The connection of one copy ends; who asked with the other one has the answer."""
    device: Any = None
    server, work, go = CallServer(device, "gpu-0"), Work(), asyncio.Event()

    async def waits() -> int:
        await go.wait()
        return await work()

    first, copy = served(server, 0, waits), served(server, 0, waits)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    go.set()
    assert ((await copy).status, (await copy).value, work.runs) == ("done", 1, 1)


@pytest.mark.asyncio
async def test_what_its_client_has_left_does_not_run() -> None:
    """Asked last before the work begins, when it has a place."""
    device: Any = None
    server, work = CallServer(device, "gpu-0"), Work()
    for number, (stays, status) in enumerate(((False, "stale"), (True, "done"))):

        async def leave(stays: bool = stays) -> bool:
            return stays

        outcome = await server.serve(RequestHeader("client", number, 0, server.incarnation), work, leave)
        assert outcome.status == status
    assert work.runs == 1
