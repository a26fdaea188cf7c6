"""The driver's turns and its end: what follows at once, what a timer continues, what a closed loop leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.at_once import FEW, WINDOW
from layerzero.scheduler.core.pending_call import DONE, PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import MAX_FOLLOWING, LoopDriver
from layerzero.spec.errors import DeadlineExceededError, RuntimeClosedError
from layerzero.spec.settings import Settings
from tests.clocks import VirtualLoop, run_virtually
from tests.scheduler.devices import Device, Double, Later

OP = Double()
PASS_S = 0.004


def call_of(group: Any = "double") -> PendingCall:
    """One call that runs on the loop's thread."""
    return PENDING_CALL.cls(OP, (1,), group, 1.0)


class Spending(Device):
    """A device whose every batch takes `spends_s` of the loop's thread."""

    spans = None

    def __init__(self, spends_s: float = 0.0) -> None:
        super().__init__()
        self.spends_s = spends_s

    def execute(self, op: Any, calls: Any, modes: Any, snapshot: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.spend(self.spends_s)
        return super().execute(op, calls, modes, snapshot)


def following(worker: Worker, device: Spending, rounds: int) -> list[int]:
    """How many batches ran between two turns of the loop, while two callers call `rounds` times each."""
    between: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        driver = LoopDriver(loop, device, worker, Settings(max_inline_us=1000.0))
        counted = 0

        def turn() -> None:
            nonlocal counted
            between.append(len(device.runs) - counted)
            counted = len(device.runs)
            loop.call_soon(turn)

        async def caller() -> None:
            for number in range(rounds):
                assert await driver.submit(call_of(number)) == 2

        loop.call_soon(turn)
        await asyncio.gather(caller(), caller())
        assert device.runs == [2] * rounds

    run_virtually(main())
    return between


def test_only_so_many_batches_follow_without_a_turn_of_the_loop(worker: Worker) -> None:
    """Callers that always call again do not keep the loop from its other tasks."""
    assert max(following(worker, Spending(), 5 * MAX_FOLLOWING)) == MAX_FOLLOWING


def test_batches_that_follow_take_no_longer_than_what_runs_inline(worker: Worker) -> None:
    """Of batches that take 0.4 of `max_inline_us` the third is the last before a turn."""
    assert max(following(worker, Spending(0.4e-3), 20)) == 3


@pytest.mark.parametrize("by_another", [False, True])
def test_the_task_that_drains_is_not_waited_for(worker: Worker, by_another: bool) -> None:
    """A task that has called may drain; where another one drains, it is a caller like others."""

    async def main() -> None:
        driver = LoopDriver(asyncio.get_running_loop(), Device(), worker)
        assert await driver.submit(call_of()) == 2
        draining = driver.drain(1.0)
        assert await (asyncio.ensure_future(draining) if by_another else draining) is not by_another
        assert (driver.callers, driver.state) == (0, "stopped")

    run_virtually(main())


def test_calls_of_a_loop_that_is_closed_end_without_a_wake(worker: Worker) -> None:
    """Nothing is asked of a closed loop; a call that queued has its error all the same."""
    loop = asyncio.new_event_loop()
    driver = LoopDriver(loop, Device(), worker)
    call = call_of()
    woken: list[object] = []
    driver.submit(call).add_done_callback(woken.append)
    loop.close()
    driver.close()
    assert isinstance(call.error(), RuntimeClosedError)
    assert (woken, driver.batcher.unfinished) == ([], 0)


def test_what_resumed_callers_submit_comes_at_one_time(worker: Worker) -> None:
    """Callers of calls that ended elsewhere are one crowd, however long each takes to call again."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        driver = LoopDriver(loop, Device(), worker)
        elsewhere = [call_of(), call_of()]
        came: list[float] = []

        async def caller(call: PendingCall) -> None:
            call.driver, call._loop = driver, loop
            assert await call == 2
            for _ in range(2):
                loop.spend(1.0)
                following = driver.submit(call_of())
                came.append(following.submitted_at)
                await following

        tasks = [asyncio.ensure_future(caller(call)) for call in elsewhere]
        await asyncio.sleep(0)
        for call in elsewhere:
            call.state, call.value = DONE, 2
        at = loop.time()
        loop.call_soon(driver.resume, elsewhere)
        await asyncio.sleep(0)
        assert came == [at, at]
        late = driver.submit(call_of())  # of nobody who was resumed
        assert late.submitted_at == loop.time() == at + 2.0
        await asyncio.gather(*tasks, late)

    run_virtually(main())


@pytest.mark.parametrize("callers", [1, FEW + 1])
def test_only_callers_that_are_there_share_a_group(worker: Worker, callers: int) -> None:
    """Calls of few need no queue, also where many others have called before and have ended."""

    async def main() -> bool:
        driver = LoopDriver(asyncio.get_running_loop(), Device(), worker)

        async def caller(calls: int) -> None:
            for _ in range(calls):
                await driver.submit(call_of())

        await asyncio.gather(*(caller(1) for _ in range(FEW + 1)))  # these have gone
        await asyncio.gather(*(caller(2 * WINDOW) for _ in range(callers)))
        return "double" in driver.at_once

    assert run_virtually(main()) is (callers == 1)


@pytest.mark.parametrize("ends", [True, False])
def test_a_call_held_for_one_that_does_not_come_is_launched_in_time(worker: Worker, ends: bool) -> None:
    """The hold ends by the driver's timer, or by news of the device, while nothing else calls."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        device: Any = Later(loop, PASS_S)
        driver = LoopDriver(loop, device, worker, always_inline=True, streams=device)
        gone = asyncio.Event()

        async def step() -> None:
            assert await driver.submit(call_of("step")) == 2

        async def reader() -> None:
            await step()
            await gone.wait()

        async def caller() -> None:
            for _ in range(2):
                await step()

        reading = asyncio.ensure_future(reader())
        calling = asyncio.ensure_future(caller())
        for _ in range(6):
            await asyncio.sleep(0)
        assert not calling.done()
        if ends:
            loop.call_at(device.free_at, driver.completed, 1)
        await asyncio.wait({calling}, timeout=100 * PASS_S)
        assert calling.done()
        gone.set()
        await reading
        return loop.time()

    run_virtually(main())


class Keeping:
    """A worker that runs nothing."""

    inside = False

    def submit(self, job: object) -> None:
        """Keep no job."""


def test_a_nearer_deadline_that_comes_later_is_kept() -> None:
    """Each of two calls behind a long batch ends at its own deadline, the second one's first."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        worker: Any = Keeping()
        driver = LoopDriver(loop, Device(), worker)
        at, ended = loop.time(), list[float]()
        assert driver.inline.ready()

        async def caller(us: float, deadline: float | None) -> None:
            call = PENDING_CALL.cls(OP, (1,), "double", us, deadline=deadline)
            with pytest.raises(RuntimeClosedError if deadline is None else DeadlineExceededError):
                await driver.submit(call)
            ended.append(loop.time() - at)

        running = asyncio.ensure_future(caller(1e9, None))
        for _ in range(3):
            await asyncio.sleep(0)
        assert driver.inline.inflight and not driver.inline.ready()  # nothing runs at once beside it
        await asyncio.gather(caller(1.0, at + 9.0), caller(1.0, at + 2.0))
        driver.close()
        await running
        assert ended[:2] == pytest.approx([2.0, 9.0])

    run_virtually(main())
