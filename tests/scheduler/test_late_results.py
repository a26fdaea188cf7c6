"""Batches that have run and whose results others bring: stages of a pipeline, seen from their first one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL, LateResults, PendingCall
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.spec.errors import RuntimeClosedError
from tests.native.twins import both_paths as both_paths
from tests.scheduler.devices import Device, Double
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("both_paths")]
OP = Double()
ON_LOOP, ON_WORKER = 1.0, 1e6


class Stages(Device):
    """A device whose batches end where `finish` says so; `late` are those that have run, in order."""

    spans = None

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[list[Any], LateResults]] = []

    def execute(self, op: Any, calls: Sequence[Any], modes: Any, snapshot: Any) -> list[Any]:
        values = [args[0] for args in calls]
        late = LateResults(len(values))
        self.late.append((values, late))
        return [(late, None)] * len(values)

    def end(self, error: Exception | None = None) -> None:
        """End the oldest of them: each caller has its value twice."""
        values, late = self.late.pop(0)
        late.end([2 * each for each in values], error)

    async def finish(self, error: Exception | None = None) -> None:
        """The same on another thread."""
        await asyncio.to_thread(self.end, error)


def submit(drivers: LoopDrivers, value: int, us: float = ON_WORKER) -> PendingCall:
    """A call whose batches hold one value each."""
    return drivers.current().submit(PENDING_CALL.cls(OP, (value,), f"crowd {value}", us))


async def waits(call: PendingCall) -> Any:
    """A task's wait for its value."""
    value, _plan = await call
    return value


@pytest.mark.parametrize("us", [ON_LOOP, ON_WORKER])
async def test_the_next_batch_runs_before_the_results_of_the_last_are_there(
    worker: Worker, us: float
) -> None:
    """Three batches have run, nobody has an answer; each has its own, in whichever order they come."""
    device = Stages()
    drivers = LoopDrivers(device, worker)
    tasks = [asyncio.create_task(waits(submit(drivers, value, us))) for value in (1, 2, 3)]
    await until(lambda: len(device.late) == 3)
    assert not any(task.done() for task in tasks)
    device.late.reverse()
    for _ in tasks:
        await device.finish()
    assert await asyncio.gather(*tasks) == [2, 4, 6]
    batcher = drivers.current().batcher
    assert (batcher.unfinished, batcher.running_calls, batcher.inflight_batches) == (0, 0, 0)


async def test_results_that_are_there_before_anybody_asks_are_given(worker: Worker) -> None:
    """A stage of its own host may end before the loop hears of the run."""

    class AtOnce(Stages):
        spans = None

        def execute(self, op: Any, calls: Sequence[Any], modes: Any, snapshot: Any) -> list[Any]:
            outcomes = super().execute(op, calls, modes, snapshot)
            self.end()
            return outcomes

    assert await waits(submit(LoopDrivers(AtOnce(), worker), 4)) == 8


async def test_an_error_of_a_later_stage_is_the_callers(worker: Worker) -> None:
    """Of that batch alone; what ends it again changes nothing."""
    device = Stages()
    drivers = LoopDrivers(device, worker)
    tasks = [asyncio.create_task(waits(submit(drivers, value))) for value in (1, 2)]
    await until(lambda: len(device.late) == 2)
    late = device.late[0][1]
    await device.finish(ArithmeticError("a stage overflowed"))
    late.end([0])
    await device.finish()
    with pytest.raises(ArithmeticError, match="a stage overflowed"):
        await tasks[0]
    assert await tasks[1] == 4


async def test_a_caller_that_is_cancelled_goes_at_once(worker: Worker) -> None:
    """Its result comes later and is dropped; the counts end at nothing."""
    device = Stages()
    drivers = LoopDrivers(device, worker)
    task = asyncio.create_task(waits(submit(drivers, 1)))
    await until(lambda: len(device.late) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    batcher = drivers.current().batcher
    assert batcher.unfinished == 1
    await device.finish()
    await until(lambda: batcher.unfinished == 0)
    assert batcher.inflight_batches == 0


@pytest.mark.parametrize("how", ["closed", "given up"])
async def test_a_driver_that_ends_leaves_no_caller_behind(worker: Worker, how: str) -> None:
    """Nobody waits for stages that may never answer; what they bring after that is dropped."""
    device = Stages()
    drivers = LoopDrivers(device, worker)
    task = asyncio.create_task(waits(submit(drivers, 1)))
    await until(lambda: len(device.late) == 1)
    if how == "closed":
        drivers.current().close()
    else:
        drivers.give_up(OP, RuntimeClosedError("the group has failed"))
    with pytest.raises(RuntimeClosedError):
        await task
    await device.finish()
    await asyncio.sleep(0.01)


async def test_as_many_values_as_callers() -> None:
    """Another number would leave one without an answer."""
    with pytest.raises(ValueError, match="values needs 2 entries, got 1"):
        LateResults(2).end([1])
