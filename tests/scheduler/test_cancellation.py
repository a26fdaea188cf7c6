"""Callers that go away at any point, in any way: nobody else notices and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.batch_runs import BatchRuns
from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.spec.errors import RuntimeClosedError
from layerzero.spec.settings import Settings
from tests.native.twins import both_paths as both_paths
from tests.scheduler.devices import Device, Double
from tests.scheduler.test_loop_driver import settled
from tests.waiting import LIMIT_S, until

OP = Double()
CALLERS = 6
# One turn of a request: cheap ops run on the loop, the dear ones on the worker.
PROGRAM = (("a", 1.0), ("b", 1e6), ("a", 1.0), ("c", 1e6))


class HandWorker:
    """A worker whose jobs run when the test says so, so that every interleaving can be had again."""

    inside = False

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


class Number:
    """An argument that can be watched; doubling it gives a plain number's worth of them."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __mul__(self, factor: int) -> Number:
        return Number(self.value * factor)


async def request(front: LoopDriver, value: int, refs: list[weakref.ref[Number]]) -> int:
    """One caller's program."""
    number = Number(value)
    for group, us in PROGRAM:
        refs.append(weakref.ref(number))
        number = await front.submit(PENDING_CALL.cls(OP, (number,), group, us, 1, 8))
    return number.value


def cancel(task: asyncio.Task[int], turn: int, at: int) -> None:
    """Cancel once."""
    if turn == at:
        task.cancel()


def cancel_twice(task: asyncio.Task[int], turn: int, at: int) -> None:
    """Cancel, and again in the next turn."""
    if turn in (at, at + 1):
        task.cancel()


Way = Callable[[asyncio.Task[int], int, int], None]
WAYS: dict[str, Way] = {"cancel": cancel, "cancel twice": cancel_twice}


async def sweep(
    victim: int, at: int, way: Callable[[asyncio.Task[int], int, int], None]
) -> tuple[bool, bool]:
    """Run all callers, end the victim's task at one turn; (whether it was hit, whether anything stayed)."""
    worker = HandWorker()
    loop = asyncio.get_running_loop()
    settings = Settings(
        max_batch_size=4, max_queue_size=3
    )  # some callers wait for room, some batches are split
    front = LoopDriver(loop, Device(), cast(Worker, worker), settings)
    refs: list[weakref.ref[Number]] = []
    tasks = [asyncio.create_task(request(front, index, refs)) for index in range(CALLERS)]
    turn = 0
    while not all(task.done() for task in tasks):
        way(tasks[victim], turn, at)
        await asyncio.sleep(0)
        if turn % 3 == 2:
            worker.run()
        turn += 1
        assert turn < 500, "somebody is stranded"
    for _ in range(4):
        worker.run()
        await asyncio.sleep(0)
    hit = tasks[victim].cancelled()
    for index in range(len(tasks)):  # a name for one task would keep it alive
        if index != victim or not hit:
            assert tasks[index].result() == index * 2 ** len(PROGRAM)
    tasks.clear()
    assert settled(front)
    assert front.callers == 0
    return hit, left_behind(refs)


def left_behind(refs: list[weakref.ref[Number]]) -> bool:
    """Whether an argument lives on."""
    for generation in range(3):  # a cancelled task and its traceback are a cycle
        if all(ref() is None for ref in refs):
            return False
        gc.collect(generation)
    return any(ref() is not None for ref in refs)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", [0, 3, CALLERS - 1])
async def test_cancelling_at_every_point_leaves_no_trace(way: str, victim: int) -> None:
    """For every k: cancelled at turn k, the others get their results and no pending call or argument is
    left."""
    hits, hit = 0, False
    for at in range(200):
        hit, leaked = await sweep(victim, at, WAYS[way])
        assert not leaked, at
        hits += hit
        if not hit and at > 0:
            break
    assert hits >= len(PROGRAM), "the sweep reached every call of the program"
    assert not hit, "the sweep went on until the victim had ended by itself"


@pytest.mark.asyncio
async def test_a_timeout_around_a_running_call_detaches_it(worker: Worker) -> None:
    """The caller is free at once; the batch goes on and keeps its arguments until it ends."""
    gate = threading.Event()
    device = Device(gate)
    front = LoopDriver(asyncio.get_running_loop(), device, worker)
    number = Number(1)
    watched = weakref.ref(number)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await front.submit(PENDING_CALL.cls(OP, (number,), "g", 1e6))
    del number
    gc.collect()
    assert watched() is not None
    assert front.batcher.stats.detached == 1 and front.batcher.stats.cancelled == 0
    gate.set()
    await until(lambda: not front.batcher.inflight_batches)
    await until(lambda: gc.collect() >= 0 and watched() is None)  # the worker's thread lets go last
    assert front.batcher.stats.cancelled == 1


@pytest.mark.asyncio
async def test_a_caller_woken_first_may_cancel_one_of_its_own_batch() -> None:
    """A task cancelled between its batch's end and its own resumption sees the cancellation."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), cast(Worker, HandWorker()))
    tasks: list[asyncio.Task[Any]] = []

    async def first() -> Any:
        value = await front.submit(PENDING_CALL.cls(OP, (1,), "g"))
        tasks[1].cancel()
        return value

    async def second() -> Any:
        return await front.submit(PENDING_CALL.cls(OP, (2,), "g"))

    tasks += [asyncio.create_task(first()), asyncio.create_task(second())]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] == 2 and isinstance(outcomes[1], asyncio.CancelledError)
    assert settled(front)


@pytest.mark.asyncio
async def test_cancelled_messages_and_done_states_reach_who_asks() -> None:
    """A pending call answers like a future: message kept, cancelled seen, one waiter only."""
    front = LoopDriver(asyncio.get_running_loop(), Device(), cast(Worker, HandWorker()))
    ticket = front.submit(PENDING_CALL.cls(OP, (1,), "g"))
    with pytest.raises(RuntimeError, match="still queued"):
        ticket.result()
    assert not ticket.done() and ticket.cancel("not needed") and not ticket.cancel()
    assert ticket.done() and ticket.cancelled()
    with pytest.raises(asyncio.CancelledError, match="not needed"):
        await ticket
    ticket = front.submit(PENDING_CALL.cls(OP, (1,), "g"))
    assert await asyncio.wait_for(ticket, 5) == 2
    assert ticket.exception() is None and await ticket == 2

    async def wait() -> Any:
        return await shared

    shared = PENDING_CALL.cls(OP, (1,), "g")
    asyncio.get_running_loop().call_soon(front.submit, shared)
    outcomes = await asyncio.gather(wait(), wait(), return_exceptions=True)
    assert outcomes[0] == 2 and isinstance(outcomes[1], RuntimeError)


def test_a_loop_closed_under_a_batch_ends_cleanly(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """The batch ends on the worker, its counts come out even, and another loop works at once."""
    gate = threading.Event()
    device = Device(gate)
    fronts = LoopDrivers(device, worker)
    fronts_seen: list[LoopDriver] = []

    async def abandoned() -> None:
        front = fronts.current()
        fronts_seen.append(front)
        front.submit(PENDING_CALL.cls(OP, (1,), "g", 1e6))
        front.submit(PENDING_CALL.cls(OP, (1,), "h", 1e6))
        await until(device.entered.is_set)

    with caplog.at_level(logging.DEBUG, "layerzero"):
        asyncio.run(abandoned())
        gate.set()
        (front,) = fronts_seen
        limit = time.monotonic() + LIMIT_S
        while front.batcher.inflight_batches and time.monotonic() < limit:
            time.sleep(0.001)
    assert front.batcher.inflight_batches == 0

    async def next_one() -> Any:
        return await fronts.current().submit(PENDING_CALL.cls(OP, (4,), "g", 1e6))

    assert asyncio.run(next_one()) == 8
    assert settled(front)
    total = fronts.stats()
    assert (total.submitted, total.done, total.cancelled, total.failed) == (3, 1, 1, 1)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("DEBUG", "loop_driver.loop_closed calls=1")
    ]


class Interrupted(Device):
    """A device during which the interpreter is told to stop."""

    spans = None

    def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
        raise KeyboardInterrupt


def test_an_interrupt_during_a_batch_strands_nobody() -> None:
    """KeyboardInterrupt leaves the loop, and every caller of that batch has an answer."""
    seen: list[BaseException] = []

    async def caller(front: LoopDriver) -> None:
        try:
            await front.submit(PENDING_CALL.cls(OP, (1,), "g"))
        except BaseException as error:
            seen.append(error)
            raise

    async def main() -> None:
        front = LoopDriver(asyncio.get_running_loop(), Interrupted(), cast(Worker, HandWorker()))
        await asyncio.gather(*(caller(front) for _ in range(3)), return_exceptions=True)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert len(seen) == 3
    assert isinstance(seen[0], RuntimeClosedError)


def test_a_caller_that_stops_the_loop_strands_nobody() -> None:
    """SystemExit out of the first caller leaves the loop; run again, the others have their results."""
    loop = asyncio.new_event_loop()
    front = LoopDriver(loop, Device(), cast(Worker, HandWorker()))

    async def caller(value: int) -> Any:
        result = await front.submit(PENDING_CALL.cls(OP, (value,), "g"))
        if value == 0:
            raise SystemExit(3)
        return result

    tasks = [loop.create_task(caller(value)) for value in range(3)]
    with pytest.raises(SystemExit):
        loop.run_forever()
    assert loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks[1:]), 5)) == [2, 4]
    assert isinstance(tasks[0].exception(), SystemExit)
    loop.close()


class Alarm(Exception):
    """What a signal handler raises."""


def alarmed(at: int, expected_us: float) -> tuple[str, list[Any]]:
    """Three callers, and a fourth later, where a signal comes in the `at`th line of a driver's callbacks.

    That line, or nothing where there are fewer; what each caller got.
    """
    lines, hit = 0, ""
    waking = LoopDriver._wake.__code__  # no signal is looked at between taking a waiter and waking it
    callbacks = {LoopDriver._tick.__code__, BatchRuns._on_batch_done.__code__, Batcher.submit.__code__}

    def is_ours(frame: Any) -> bool:
        while frame is not None and frame.f_code not in callbacks:
            frame = frame.f_back
        return frame is not None

    def on_line(frame: Any, event: str, value: Any) -> Any:
        nonlocal lines, hit
        if event == "line" and (lines := lines + 1) == at:
            hit = f"{frame.f_code.co_name}:{frame.f_lineno}"
            sys.settrace(None)
            raise Alarm
        return on_line

    def on_call(frame: Any, event: str, value: Any) -> Any:
        ours = "scheduler" in Path(frame.f_code.co_filename).parts and frame.f_code is not waking
        return on_line if ours and is_ours(frame) else None

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        worker = HandWorker()
        drivers = LoopDrivers(Device(), cast(Worker, worker))

        async def caller(value: int) -> Any:
            return await drivers.current().submit(PENDING_CALL.cls(OP, (value,), "g", expected_us))

        async def turns() -> None:
            for _ in range(12):
                await asyncio.sleep(0)
                worker.run()

        tasks = [asyncio.ensure_future(caller(value)) for value in range(3)]
        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            await turns()
        finally:
            sys.settrace(before)
        tasks.append(asyncio.ensure_future(caller(3)))
        await turns()
        return ["waits" if not task.done() else task.exception() or task.result() for task in tasks]

    answers = asyncio.run(main())
    return hit, answers


@pytest.mark.parametrize("expected_us", [1.0, 1e6], ids=["on the loop", "on the worker"])
def test_a_signal_handler_that_raises_in_the_middle_of_a_change_strands_nobody(expected_us: float) -> None:
    """Wherever it raises, its exception or a result comes to every caller, and later calls run."""
    points = 0
    while True:
        hit, answers = alarmed(points + 1, expected_us)
        assert answers[3] == 6 and all(
            answer == 2 * value or isinstance(answer, Alarm) for value, answer in enumerate(answers)
        ), (hit, answers)
        if not hit:  # it has fewer lines
            break
        points += 3
    assert points > 300


@pytest.mark.asyncio
async def test_closing_answers_everybody(worker: Worker) -> None:
    """Queued and running callers get RuntimeClosedError, the late batch lands without harm."""
    gate = threading.Event()
    device = Device(gate)
    front = LoopDriver(asyncio.get_running_loop(), device, worker)

    async def caller(group: str) -> Any:
        return await front.submit(PENDING_CALL.cls(OP, (1,), group, 1e6))

    tasks = [asyncio.create_task(caller(group)) for group in ("a", "a", "b")]
    await until(device.entered.is_set)
    assert not await front.drain(0.01)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RuntimeClosedError] * 3
    gate.set()
    await until(lambda: not front.batcher.inflight_batches)
    assert settled(front)
    assert front.callers == 0


@pytest.mark.asyncio
async def test_the_sweep_sees_a_lane_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where cancelling only wakes the caller, the sweep finds what stays behind."""

    def only_wake(self: LoopDriver, ticket: PendingCall, message: object = None) -> bool:
        if ticket.done():
            return False
        self.fail(ticket, asyncio.CancelledError())
        return True

    monkeypatch.setattr(LoopDriver, "cancel", only_wake)
    with pytest.raises(RuntimeError, match="still"):
        for at in range(1, 20):
            await sweep(0, at, cancel)
