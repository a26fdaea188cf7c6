"""What awaiting means, under asyncio and trio alike: batches, errors, limits, deadlines, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import torch
import trio

import layerzero as lz
from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL, TaskTree
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.scheduler.trio_driver import TrioLoop
from layerzero.spec.errors import DeadlineExceededError, OverloadedError, RuntimeClosedError
from layerzero.spec.settings import Settings
from tests.scheduler.devices import Device, Double
from tests.scheduler.test_loop_driver import CHEAP, DEAR, settled

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "trio"])
OP = Double()


async def doubled(front: LoopDriver, value: Any, *, us: float = CHEAP, **more: Any) -> Any:
    """One call of `Double`, awaited as the public ops are."""
    return await front.waiting(front.submit(PENDING_CALL.cls(OP, (value,), "double", us, **more)))


async def gathered(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What concurrent tasks return or raise, in order."""
    outcomes: list[Any] = [None] * len(calls)

    async def one(position: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            outcomes[position] = await call()
        except Exception as error:
            outcomes[position] = error

    async with anyio.create_task_group() as group:
        for position, call in enumerate(calls):
            group.start_soon(one, position, call)
    return outcomes


async def turns(count: int) -> None:
    """Let so many turns of the loop pass."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@LOOPS
@pytest.mark.parametrize("us", [CHEAP, DEAR])
def test_concurrent_callers_share_each_launch(loop: str, us: float, worker: Worker) -> None:
    """64 tasks of five calls each become five batches, run here or on the worker; nothing is left over."""
    device = Device()

    async def main() -> None:
        fronts = LoopDrivers(device, worker)

        async def caller(value: int) -> int:
            for _ in range(5):
                value = await doubled(fronts.current(), value, us=us)
            return value

        results = await gathered(*(lambda i=i: caller(i) for i in range(64)))
        assert results == [32 * i for i in range(64)]
        assert device.runs == [64] * 5
        await turns(4)
        assert settled(fronts.current()) and fronts.current().callers == 0

    anyio.run(main, backend=loop)


@LOOPS
def test_a_poisoned_caller_fails_alone(loop: str, worker: Worker) -> None:
    """Its error is its own; the others of its batch have their results."""

    async def main() -> None:
        front = LoopDrivers(Device(), worker).current()
        values = [1, 2, "poison", 4]
        results = await gathered(*(lambda v=v: doubled(front, v) for v in values))
        assert isinstance(results[2], ValueError)
        assert [results[i] for i in (0, 1, 3)] == [2, 4, 8]

    anyio.run(main, backend=loop)


@LOOPS
def test_a_full_queue_rejects_or_lets_wait_in_order(loop: str, worker: Worker) -> None:
    """With `reject` the third call is refused with a time; with `wait` all run, in the order of arrival."""

    async def main() -> None:
        small = Settings(max_queue_size=2, max_batch_size=1, queue_full_policy="reject")
        front = LoopDrivers(Device(), worker, small).current()
        results = await gathered(*(lambda i=i: doubled(front, i) for i in range(3)))
        refused = [r for r in results if isinstance(r, OverloadedError)]
        assert len(refused) == 1 and refused[0].retry_after > 0
        patient = LoopDrivers(Device(), worker, small.replace(queue_full_policy="wait")).current()
        results = await gathered(*(lambda i=i: doubled(patient, i) for i in range(10)))
        assert results == [2 * i for i in range(10)] and settled(patient)

    anyio.run(main, backend=loop)


@LOOPS
def test_a_call_that_is_too_late_never_runs(loop: str, worker: Worker) -> None:
    """A deadline that passes in the queue is an error of its own; the device saw only the call before."""
    gate = threading.Event()
    device = Device(gate)

    async def main() -> None:
        front = LoopDrivers(device, worker).current()

        async def late() -> None:
            with pytest.raises(DeadlineExceededError):
                await doubled(front, 2, us=DEAR, deadline=front.loop.time() + 0.02)
            gate.set()

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: doubled(front, 1, us=DEAR))
            await anyio.to_thread.run_sync(device.entered.wait)
            group.start_soon(late)
        await turns(4)
        assert settled(front)

    anyio.run(main, backend=loop)
    assert device.runs == [1]


@LOOPS
def test_cancelling_a_queued_call_takes_it_back_and_a_running_one_is_detached(
    loop: str, worker: Worker
) -> None:
    """The batch does not notice, its other callers have their results, and the counters add up."""
    gate = threading.Event()
    device = Device(gate)

    async def main() -> None:
        front = LoopDrivers(device, worker).current()
        got: list[Any] = []

        async def stays() -> None:
            got.append(await doubled(front, 3, us=DEAR))

        async with anyio.create_task_group() as group:
            group.start_soon(stays)
            with anyio.CancelScope() as running:
                group.start_soon(cancel_when, running, device.entered)
                await doubled(front, 4, us=DEAR)
            with anyio.move_on_after(0.02) as queued:
                await doubled(front, 5, us=DEAR)
            assert running.cancelled_caught and queued.cancelled_caught
            gate.set()
        await turns(4)
        stats = front.batcher.stats
        assert got == [6] and settled(front)
        assert (stats.cancelled, stats.detached, stats.done) == (2, 1, 1)

    anyio.run(main, backend=loop)
    assert device.runs == [2]


async def cancel_when(scope: anyio.CancelScope, entered: threading.Event) -> None:
    """Cancel as soon as the device is at work."""
    await anyio.to_thread.run_sync(entered.wait)
    scope.cancel()


@LOOPS
def test_draining_lets_known_callers_end_and_refuses_new_ones(loop: str, worker: Worker) -> None:
    """A request in the middle of its program ends; a new task is refused; afterwards nothing is taken."""

    async def main() -> None:
        fronts = LoopDrivers(Device(), worker)
        front = fronts.current()
        outcomes: dict[str, Any] = {}

        async def request() -> None:
            value = 1
            for _ in range(5):
                value = await doubled(front, value)
            outcomes["known"] = value

        async def drain() -> None:
            outcomes["in time"] = await fronts.drain(20.0)

        async with anyio.create_task_group() as group:
            group.start_soon(request)
            while not front.callers:
                await turns(1)
            group.start_soon(drain)
            while front.state == "running":
                await turns(1)
            with pytest.raises(RuntimeClosedError):
                await doubled(front, 1)
        assert outcomes == {"known": 32, "in time": True}
        with pytest.raises(RuntimeClosedError):
            await doubled(fronts.current(), 1)

    anyio.run(main, backend=loop)


@LOOPS
def test_closing_answers_everybody(loop: str, worker: Worker) -> None:
    """Who queues or runs gets RuntimeClosedError; nobody waits for ever."""
    gate = threading.Event()
    device = Device(gate)

    async def main() -> None:
        fronts = LoopDrivers(device, worker)
        front = fronts.current()

        async def close() -> None:
            await anyio.to_thread.run_sync(device.entered.wait)
            fronts.close()
            gate.set()

        calls = [lambda i=i: doubled(front, i, us=DEAR) for i in range(3)]
        *results, _ = await gathered(*calls, close)
        assert [type(result) for result in results] == [RuntimeClosedError] * 3

    anyio.run(main, backend=loop)


def times_two(rows: torch.Tensor) -> torch.Tensor:
    """A function that batches."""
    return rows * 2


@LOOPS
def test_public_ops_give_what_the_blocking_ones_give(loop: str) -> None:
    """Ops, batched functions, modes that differ across tasks, gradients, a lone caller, two runs in a row."""
    weight = torch.randn(32)
    twice = lz.batched(times_two)

    async def caller(number: int) -> None:
        rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(number))
        with torch.set_grad_enabled(number % 2 == 0):
            for _ in range(3):
                normed = await lz.rms_norm(rows, weight)
                assert torch.allclose(normed, lz.sync.rms_norm(rows, weight), atol=1e-6)
                assert torch.is_grad_enabled() is (number % 2 == 0)
                assert torch.equal(await twice(rows), rows * 2)
        wants = rows.clone().requires_grad_()
        (await lz.linear(wants, torch.eye(32))).sum().backward()
        assert torch.equal(wants.grad, torch.ones(2, 32))  # type: ignore[arg-type]
        assert torch.equal(await lz.to_host(rows), rows)
        with pytest.raises(ValueError, match="eps needs"):
            await lz.rms_norm(rows, weight, eps=-1.0)

    async def main() -> None:
        await caller(0)
        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(caller, number)

    with lz.start(lz.Settings(warm="off")) as runtime:
        rows = torch.ones(2, 32, requires_grad=True)  # what is imported with first calls is not the loop's
        assert callable(lz.to_host) and lz.sync.rms_norm(rows.detach(), weight).shape == rows.shape
        lz.sync.linear(rows, torch.eye(32)).sum().backward()
        for _ in range(2):
            anyio.run(main, backend=loop)
        stats = runtime.device().loop_drivers.stats()
    assert stats.submitted == stats.ended
    assert stats.mean_batch > 2


def test_under_trio_a_request_is_a_task() -> None:
    """`spawn` steps asyncio's coroutines alone, and says so; the coroutine is closed."""

    async def request() -> None:
        await lz.rms_norm(torch.ones(1, 8))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="under trio start a task in a nursery"):
            runtime.spawn(request())

    with lz.start(lz.Settings(warm="off")) as runtime:
        trio.run(main)


def test_a_run_of_trio_has_one_loop_however_many_devices_and_refusals(worker: Worker) -> None:
    """Two devices share its turns; a closed one that refuses calls adds nothing to the run."""

    async def main() -> None:
        first, second = LoopDrivers(Device(), worker), LoopDrivers(Device(), worker)
        assert first.current().loop is second.current().loop
        first.close()
        await turns(2)
        tasks = trio.lowlevel.current_statistics().tasks_living
        closed = LoopDrivers(Device(), worker)
        closed.close()
        for _ in range(5):
            with pytest.raises(RuntimeClosedError):
                closed.current()
        assert trio.lowlevel.current_statistics().tasks_living == tasks

    trio.run(main)


def test_a_run_leaves_nothing_with_its_driver(worker: Worker) -> None:
    """Later runs have drivers of their own, and those of ended runs are let go of."""
    fronts = LoopDrivers(Device(), worker)
    seen: list[int] = []

    async def main() -> None:
        await doubled(fronts.current(), 1)
        seen.append(len(fronts.by_loop))

    for _ in range(4):
        trio.run(main)
    anyio.run(main)
    assert seen == [1] * 5 and fronts.stats().done == 5


def test_tasks_of_a_trio_run_know_the_one_that_made_them() -> None:
    """On a device that answers early: tasks made by one that has called share its tree, another's do not."""

    async def main() -> tuple[TaskTree | None, list[TaskTree | None]]:
        loop, trees = TrioLoop(), list[TaskTree | None]()

        async def child() -> None:
            trees.append(TaskTree.begin(loop.current_task()))

        first = TaskTree.begin(loop.current_task())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
            nursery.start_soon(child)
        return first, trees

    first, trees = trio.run(main)
    assert first is None and trees[0] is trees[1] is not None
