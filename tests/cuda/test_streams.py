"""Callers on CUDA streams of their own: who waits for whom, when memory may go, when callers are answered."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.scheduler.modes import readback, streams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device"),
]
WIDTH = 1024
LONG = 200_000_000  # device cycles, about 0.1 s: longer than anything here takes


def settings(**more: Any) -> lz.Settings:
    """A runtime of the GPU that loads nothing in the background."""
    return lz.Settings(device="cuda", warm="off", perfdb=None, **more)


@pytest.fixture
def runtime() -> Iterator[lz.Runtime]:
    """A runtime for one test."""
    with lz.start(settings(), scoped=True) as opened:
        yield opened


def sizes(runtime: lz.Runtime) -> dict[int, int]:
    """Batches by size."""
    found: dict[int, int] = runtime.device("cuda").loop_drivers.stats().sizes
    return found


async def on(stream: Any, call: Callable[[], Awaitable[Tensor]]) -> Tensor:
    """Await a call with `stream` in force around it, as a caller with a stream of its own does."""
    with torch.cuda.stream(stream):
        return await call()


async def slow_producers(count: int) -> list[bool]:
    """Callers that compute their input on streams of their own, slowly; whether each result was right."""
    weight = torch.eye(WIDTH, device="cuda")
    own = [torch.cuda.Stream() for _ in range(count)]

    async def caller(number: int) -> Tensor:
        with torch.cuda.stream(own[number]):
            x = torch.zeros(4, WIDTH, device="cuda")
            torch.cuda._sleep(LONG)
            x.fill_(float(number + 1))
            out = await lz.linear(x, weight)
            return out * 1.0  # read on the caller's own stream

    torch.cuda.synchronize()
    outs = await asyncio.gather(*map(caller, range(count)))
    torch.cuda.synchronize()
    return [bool((out == number + 1).all()) for number, out in enumerate(outs)]


def test_callers_of_several_streams_share_a_batch(runtime: lz.Runtime) -> None:
    """One launch, and every caller's slow input is waited for."""
    assert asyncio.run(slow_producers(4)) == [True] * 4
    assert sizes(runtime) == {4: 1}


def test_a_missing_wait_is_caught(runtime: lz.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a batcher that waits for nobody reads what is not there yet."""
    monkeypatch.setattr(streams, "wait_for_stream", lambda later, earlier: None)
    assert asyncio.run(slow_producers(4)) != [True] * 4


async def slow_consumers() -> bool:
    """Two callers read their output late and drop it early, two others overwrite freed memory at once."""
    weight = torch.eye(WIDTH, device="cuda")
    reading, writing = ([torch.cuda.Stream(), torch.cuda.Stream()] for _ in range(2))
    rows = 64

    async def reader(stream: Any) -> Tensor:
        with torch.cuda.stream(stream):
            x = torch.ones(rows, WIDTH, device="cuda")
            out = await lz.linear(x, weight)
            torch.cuda._sleep(LONG)
            late = torch.empty(rows, WIDTH, device="cuda").copy_(out)
            del out, x
            return late

    async def poisoner(stream: Any) -> None:
        with torch.cuda.stream(stream):
            await lz.linear(torch.full((rows, WIDTH), -7.0, device="cuda"), weight)

    lates = await asyncio.gather(*map(reader, reading))
    for _ in range(4):
        await asyncio.gather(*map(poisoner, writing))
    torch.cuda.synchronize()
    return all(bool((late == 1.0).all()) for late in lates)


def test_memory_that_a_slow_caller_reads_is_not_given_away(runtime: lz.Runtime) -> None:
    """An output dropped early stays until its caller's stream has read it."""
    assert asyncio.run(slow_consumers())
    assert sizes(runtime) == {2: 5}


def test_an_early_drop_is_caught(runtime: lz.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: an allocator that is not told hands the memory to the next batch."""
    monkeypatch.setattr(streams, "record_stream", lambda tensor, stream: None)
    assert not asyncio.run(slow_consumers())


def test_each_caller_has_its_own_stream_behind_the_await(runtime: lz.Runtime) -> None:
    """The stream leaves with its caller and comes back with it; whoever runs meanwhile has the loop's own."""
    own = [torch.cuda.Stream() for _ in range(3)]
    ambient = torch.cuda.default_stream()
    weight = torch.eye(WIDTH, device="cuda")

    async def caller(number: int) -> bool:
        assert torch.cuda.current_stream() == ambient
        with torch.cuda.stream(own[number]):
            for _ in range(3):
                await lz.linear(torch.ones(1, WIDTH, device="cuda"), weight)
                if torch.cuda.current_stream() != own[number]:
                    return False
        return torch.cuda.current_stream() == ambient

    async def every() -> list[bool]:
        return await asyncio.gather(*map(caller, range(3)))

    assert asyncio.run(every()) == [True] * 3


def test_one_stream_needs_no_other(runtime: lz.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers of one stream run on it: nothing waits, nothing is recorded."""
    crossings: list[object] = []
    monkeypatch.setattr(streams, "wait_for_stream", lambda *of: crossings.append(of))
    monkeypatch.setattr(streams, "record_stream", lambda *of: crossings.append(of))
    weight, side = torch.eye(WIDTH, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    async def caller() -> Tensor:
        return await on(side, lambda: lz.linear(torch.ones(2, WIDTH, device="cuda"), weight))

    async def every() -> list[Tensor]:
        return await asyncio.gather(*[caller() for _ in range(5)])

    outs = asyncio.run(every())
    torch.cuda.synchronize()
    assert all(bool((out == 1).all()) for out in outs) and crossings == []
    assert sizes(runtime) == {5: 1}


@pytest.mark.parametrize("completion", ["stream", "host"])
def test_callers_go_on_when_launched_or_when_run(completion: str) -> None:
    """The first answers while the device still works, the second when it has run and the loop turned."""
    weight = torch.eye(WIDTH, device="cuda")
    turns: list[int] = []

    async def caller() -> bool:
        x = torch.ones(2, WIDTH, device="cuda")
        torch.cuda._sleep(LONG)
        await lz.linear(x, weight)
        return torch.cuda.current_stream().query()

    async def turning() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0.001)

    async def every() -> list[bool]:
        other = asyncio.create_task(turning())
        done = await asyncio.gather(caller(), caller())
        other.cancel()
        return list(done)

    with lz.start(settings(completion=completion), scoped=True):
        asyncio.run(every())  # loads what a first call loads
        turns.clear()
        finished = asyncio.run(every())
    torch.cuda.synchronize()
    assert finished == [completion == "host"] * 2
    assert (len(turns) > 20) == (completion == "host")


def test_host_completion_wakes_the_loop_once_a_batch() -> None:
    """The reaper waits for one event a batch, however many callers it has."""
    weight, events = torch.eye(WIDTH, device="cuda"), []
    reap = streams.DeviceStreams.notify_when_done

    def counted(self: Any, modes: Any, told: Any) -> None:
        events.append(threading.get_ident())
        reap(self, modes, told)

    async def every() -> list[Tensor]:
        return await asyncio.gather(
            *[lz.linear(torch.ones(1, WIDTH, device="cuda"), weight) for _ in range(64)]
        )

    with pytest.MonkeyPatch.context() as patch, lz.start(settings(completion="host"), scoped=True):
        patch.setattr(streams.DeviceStreams, "notify_when_done", counted)
        outs = asyncio.run(every())
    assert len(events) == 1
    assert all(bool((out == 1).all()) for out in outs)


def test_cancelled_while_it_runs_leaves_the_others_their_results() -> None:
    """A caller that goes while the device works is detached; nothing is freed under the kernel."""
    weight = torch.eye(WIDTH, device="cuda")

    async def caller(number: int) -> Tensor:
        return await lz.linear(torch.full((1, WIDTH), float(number), device="cuda"), weight)

    async def every() -> list[Any]:
        torch.cuda._sleep(LONG)
        tasks = [asyncio.create_task(caller(number)) for number in range(8)]
        await asyncio.sleep(0.02)
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with lz.start(settings(completion="host"), scoped=True) as runtime:
        asyncio.run(every())
        outs = asyncio.run(every())
        stats = runtime.device("cuda").loop_drivers.stats()
    assert isinstance(outs[3], asyncio.CancelledError)
    assert all(bool((out == number).all()) for number, out in enumerate(outs) if number != 3)
    assert stats.submitted == stats.done + stats.failed + stats.cancelled + stats.expired + stats.rejected


# -- reading back -----------------------------------------------------------------------------------------


def test_results_are_read_back_without_stopping_the_loop(runtime: lz.Runtime) -> None:
    """By themselves, right, while the loop turns; the small rows of one batch are one copy, one event."""
    launches: list[int] = []
    launch = readback.CudaCopies.launch

    def counted(self: Any, tensors: list[Tensor], sources: Any) -> Any:
        launches.append(len(tensors))
        return launch(self, tensors, sources)

    weight = torch.eye(WIDTH, device="cuda")
    turns = 0

    async def turning() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def caller(number: int) -> Tensor:
        out = await lz.linear(torch.full((1, WIDTH), float(number), device="cuda"), weight)
        return await lz.to_host(out)

    async def every() -> list[Tensor]:
        other = asyncio.create_task(turning())
        torch.cuda._sleep(LONG)
        rows = await asyncio.gather(*map(caller, range(32)))
        other.cancel()
        return rows

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(every())
        patch.setattr(readback.CudaCopies, "launch", counted)
        turns = 0
        rows = asyncio.run(every())
    assert launches == [1] and turns > 20
    assert all(row.device.type == "cpu" for row in rows)
    assert all(bool((row == number).all()) for number, row in enumerate(rows))
    assert all(len(pickle.dumps(row)) < WIDTH * 4 + 1000 for row in rows)


def test_a_result_is_read_back_on_the_callers_stream(runtime: lz.Runtime) -> None:
    """What a slow stream still writes is waited for, from whatever stream the others read."""

    async def caller(number: int) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(8, device="cuda")
            torch.cuda._sleep(LONG)
            x.fill_(float(number))
            return await lz.to_host(x)

    async def every() -> list[Tensor]:
        return await asyncio.gather(*map(caller, range(1, 5)))

    rows = asyncio.run(every())
    assert [row.tolist() for row in rows] == [[float(number)] * 8 for number in range(1, 5)]


# -- torch's modes ----------------------------------------------------------------------------------------


def test_a_capture_meets_no_lane(runtime: lz.Runtime) -> None:
    """Awaited under graph capture an op runs at once, into the graph; the batcher sees nothing of it."""
    weight, x = torch.eye(WIDTH, device="cuda"), torch.ones(2, WIDTH, device="cuda")

    async def capture() -> tuple[Any, Tensor]:
        await asyncio.gather(lz.linear(x, weight), lz.linear(x, weight))
        before = runtime.device("cuda").loop_drivers.stats().submitted
        with lz.rehearse_capture():
            lz.sync.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = await lz.linear(x, weight)
        assert runtime.device("cuda").loop_drivers.stats().submitted == before
        return graph, out

    graph, out = asyncio.run(capture())
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((out == 3.0).all())


def test_inference_mode_and_gradients_keep_apart_on_streams(runtime: lz.Runtime) -> None:
    """A caller that wants a gradient runs alone and gets it; one that wants none has no graph."""
    weight = torch.randn(WIDTH, WIDTH, device="cuda")
    learned = torch.randn(WIDTH, WIDTH, device="cuda", requires_grad=True)

    async def learning() -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            out = await lz.linear(torch.ones(1, WIDTH, device="cuda"), learned)
            (grad,) = torch.autograd.grad(out.sum(), learned)
            return grad

    async def inferring() -> Tensor:
        with torch.no_grad():
            return await on(
                torch.cuda.Stream(), lambda: lz.linear(torch.ones(1, WIDTH, device="cuda"), weight)
            )

    async def every() -> list[Tensor]:
        return list(await asyncio.gather(learning(), inferring(), learning(), inferring()))

    first, plain, second, other = asyncio.run(every())
    torch.cuda.synchronize()
    assert bool((first == 1).all()) and bool((second == 1).all())
    assert not plain.requires_grad and torch.equal(plain, other)
    with lz.start(settings(inference=True), scoped=True):
        assert all(out.is_inference() or not out.requires_grad for out in asyncio.run(_plainly(learned)))


async def _plainly(weight: Tensor) -> list[Tensor]:
    return await asyncio.gather(*[lz.linear(torch.ones(1, WIDTH, device="cuda"), weight) for _ in range(2)])
