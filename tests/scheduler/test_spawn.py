"""Spawned coroutines: results, errors, what else they may await, cancellation at every point."""

from __future__ import annotations

import asyncio
import weakref
from contextvars import ContextVar
from typing import Any, cast

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.spawn import SpawnedTask, spawn
from layerzero.spec.errors import RuntimeClosedError
from tests.native.twins import both_paths as both_paths
from tests.scheduler.devices import Device, Double
from tests.scheduler.test_cancellation import PROGRAM, HandWorker, Number, left_behind
from tests.scheduler.test_loop_driver import settled

OP = Double()
NAME: ContextVar[str] = ContextVar("NAME", default="unset")


def call(front: LoopDriver, value: Any, group: Any = "g", us: float = 1.0) -> PendingCall:
    """One call of `Double`."""
    return front.submit(PENDING_CALL.cls(OP, (value,), group, us, 1, 8))


@pytest.mark.asyncio
async def test_spawned_callers_batch_with_one_another_and_with_tasks(worker: Worker) -> None:
    """Spawned coroutines and tasks meet in the same batches, inline and on the worker."""
    device = Device()
    front = LoopDriver(asyncio.get_running_loop(), device, worker)

    async def request(value: int) -> int:
        first = await call(front, value)
        second: int = await call(front, first, "next", 1e6)
        return second

    spawned = [spawn(front, request(index)) for index in range(32)]
    tasks = [asyncio.create_task(request(index)) for index in range(32, 64)]
    assert [await each for each in spawned] == [4 * index for index in range(32)]
    assert [await each for each in tasks] == [4 * index for index in range(32, 64)]
    assert device.runs == [64, 64]
    assert all(each.done() for each in spawned)
    await asyncio.sleep(0)
    assert front.callers == 0 and settled(front)


@pytest.mark.asyncio
async def test_errors_and_refusals_reach_who_awaits(worker: Worker) -> None:
    """An op's error passes through the coroutine; a stopped front takes no new one and closes it."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), worker)

    async def poisoned() -> Any:
        try:
            await call(front, "poison")
        except ValueError as error:
            raise KeyError("seen") from error

    with pytest.raises(KeyError, match="seen"):
        await spawn(front, poisoned())
    front.close()
    coro = poisoned()
    with pytest.raises(RuntimeClosedError):
        spawn(front, coro)
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await coro


@pytest.mark.asyncio
async def test_whatever_a_loop_knows_can_be_awaited(worker: Worker) -> None:
    """Sleeps, futures, queues, tasks and other spawned coroutines work between ops; nonsense is an error."""
    loop = asyncio.get_running_loop()
    front = LoopDriver(loop, Device(), worker)
    queue: asyncio.Queue[int] = asyncio.Queue()
    future: asyncio.Future[int] = loop.create_future()

    async def inner() -> int:
        await asyncio.sleep(0)
        doubled: int = await call(front, 10)
        return doubled

    async def outer() -> list[Any]:
        seen: list[Any] = [await call(front, 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        seen += [await future, await queue.get()]
        seen.append(await asyncio.create_task(inner()))
        seen.append(await spawn(front, inner()))
        seen.append(await call(front, 2))
        return seen

    class Odd:
        """Yields what no loop understands."""

        def __await__(self) -> Any:
            yield "nonsense"

    async def odd() -> None:
        await Odd()

    result = spawn(front, outer())
    loop.call_later(0.005, future.set_result, 3)
    loop.call_later(0.006, queue.put_nowait, 4)
    assert await result == [2, 3, 4, 20, 20, 4]
    with pytest.raises(RuntimeError, match="nonsense"):
        await spawn(front, odd())


@pytest.mark.asyncio
async def test_each_keeps_its_own_context(worker: Worker) -> None:
    """Context variables set in one spawned coroutine stay with it across its awaits."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), worker)

    async def request(name: str) -> str:
        NAME.set(name)
        await call(front, 1)
        await asyncio.sleep(0)
        return NAME.get()

    spawned = [spawn(front, request(name)) for name in "abc"]
    assert [await each for each in spawned] == ["a", "b", "c"]
    assert NAME.get() == "unset"


async def sweep(victim: int, at: int, through_awaiter: bool) -> tuple[bool, bool]:
    """Cancel one of five at one turn; (whether it was hit, whether anything stayed)."""
    worker = HandWorker()
    front = LoopDriver(asyncio.get_running_loop(), Device(), cast(Worker, worker))
    refs: list[weakref.ref[Number]] = []

    async def request(value: int) -> int:
        number = Number(value)
        for group, us in PROGRAM:
            refs.append(weakref.ref(number))
            number = await call(front, number, group, us)
            await asyncio.sleep(0)
        return number.value

    async def awaiter(spawned: SpawnedTask[int]) -> int:
        return await spawned

    spawned = [spawn(front, request(index)) for index in range(5)]
    tasks = [asyncio.create_task(awaiter(each)) for each in spawned]
    turn = 0
    while not all(task.done() for task in tasks):
        if turn == at:
            if through_awaiter:
                tasks[victim].cancel()
            else:
                spawned[victim].cancel()
        await asyncio.sleep(0)
        if turn % 3 == 2:
            worker.run()
        turn += 1
        assert turn < 500, "somebody is stranded"
    for _ in range(6):
        worker.run()
        await asyncio.sleep(0)
    hit = tasks[victim].cancelled()
    for index in range(len(tasks)):  # a name for one task would keep it alive
        if index != victim or not hit:
            assert tasks[index].result() == index * 2 ** len(PROGRAM)
    assert not spawned[victim].cancel() or hit
    spawned.clear()
    tasks.clear()
    assert settled(front)
    assert front.callers == 0
    return hit, left_behind(refs)


@pytest.mark.asyncio
@pytest.mark.parametrize("through_awaiter", [False, True])
@pytest.mark.parametrize("victim", [0, 4])
async def test_cancelling_at_every_point_leaves_no_trace(victim: int, through_awaiter: bool) -> None:
    """Whenever one is cancelled, directly or by its awaiter, the others end well and nothing is left."""
    hits, hit = 0, False
    for at in range(200):
        hit, leaked = await sweep(victim, at, through_awaiter)
        assert not leaked, at
        hits += hit
        if not hit:
            break
    assert hits >= 2 * len(PROGRAM)
    assert not hit


@pytest.mark.asyncio
async def test_a_coroutine_may_clean_up_after_its_cancellation(worker: Worker) -> None:
    """Awaiting in `finally` works, and the cancellation arrives afterwards."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), worker)
    cleaned: list[int] = []

    async def request() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(await call(front, 5))

    spawned = spawn(front, request())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert spawned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawned
    assert cleaned == [10]


@pytest.mark.asyncio
async def test_draining_waits_for_spawned_callers(worker: Worker) -> None:
    """A drain lets a spawned request end."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), worker)

    async def request() -> int:
        value = 1
        for _ in range(5):
            value = await call(front, value)
        return value

    spawned = spawn(front, request())
    await asyncio.sleep(0)
    assert await front.drain(5.0)
    assert await spawned == 32


@pytest.mark.asyncio
async def test_a_coroutine_ends_with_the_task_that_awaits_it(worker: Worker) -> None:
    """Cancelled by its awaiter it does not run on: it is cancelled where it waits."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), worker)
    seen: list[str] = []

    async def request() -> None:
        await call(front, 1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    spawned = spawn(front, request())

    async def awaiter() -> None:
        await spawned

    task = asyncio.create_task(awaiter())
    for _ in range(6):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == ["cancelled"]
    assert front.callers == 0 and settled(front)
