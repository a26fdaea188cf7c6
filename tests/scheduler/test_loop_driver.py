"""The front on real event loops: batching, inline rule, deadlines, limits, drain, loops and threads."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.spec.errors import DeadlineExceededError, OverloadedError, RuntimeClosedError
from layerzero.spec.settings import Settings
from tests.clocks import run_virtually
from tests.native.twins import both_paths as both_paths
from tests.scheduler.devices import Device, Double
from tests.waiting import until

OP = Double()
CHEAP, DEAR = 1.0, 1e6


def ticket(value: Any, *, us: float = CHEAP, group: Any = "double", **more: Any) -> PendingCall:
    """One call of `Double`."""
    return PENDING_CALL.cls(OP, (value,), group, us, **more)


def settled(front: LoopDriver) -> bool:
    """Whether nothing is left in the batcher and the counters add up."""
    lane, stats = front.batcher, front.batcher.stats
    return (lane.unfinished, lane.queued, lane.queued_bytes, lane.running_calls, lane.inflight_batches) == (
        0, 0, 0, 0, 0,
    ) and stats.submitted == stats.ended  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("us", [CHEAP, DEAR])
async def test_concurrent_callers_share_one_launch(worker: Worker, us: float) -> None:
    """64 tasks that call in the same turn become one batch, inline or on the worker alike."""
    device = Device()
    fronts = LoopDrivers(device, worker)

    async def caller(value: int) -> int:
        first: int = await fronts.current().submit(ticket(value, us=us))
        second: int = await fronts.current().submit(ticket(first, us=us, group="next"))
        return second

    results = await asyncio.gather(*(caller(i) for i in range(64)))
    assert results == [4 * i for i in range(64)]
    assert device.runs == [64, 64]
    assert device.threads == ({"test-device"} if us == DEAR else {threading.current_thread().name})
    await asyncio.sleep(0)
    assert settled(fronts.current())


@pytest.mark.asyncio
async def test_a_batch_of_the_worker_is_followed_at_once_where_all_have_called(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rounds the same callers make, the loop is asked for the same few turns."""
    loop = asyncio.get_running_loop()
    turns: list[str] = []
    soon: Any = loop.call_soon

    def call_soon(callback: Any, *args: Any, **named: Any) -> Any:
        if getattr(callback, "__self__", None).__class__ is LoopDriver:
            turns.append(callback.__name__)
        return soon(callback, *args, **named)

    monkeypatch.setattr(loop, "call_soon", call_soon)
    asked = []
    for rounds in (2, 6):
        device = Device()
        fronts = LoopDrivers(device, worker)
        turns.clear()

        async def caller(fronts: LoopDrivers = fronts, rounds: int = rounds) -> None:
            for index in range(rounds):
                await fronts.current().submit(ticket(1, us=DEAR, group=index))

        await asyncio.gather(*(caller() for _ in range(4)))
        assert device.runs == [4] * rounds
        asked.append(len(turns))
    assert asked[0] == asked[1] > 0


@pytest.mark.asyncio
async def test_only_a_task_that_is_alone_runs_inline(worker: Worker) -> None:
    """The first call gives a turn, later ones may run at once; a second task suspends that while it lives."""
    fronts = LoopDrivers(Device(), worker, Settings(max_inline_us=100.0))
    front = fronts.current()
    assert not front.may_inline()
    await front.submit(ticket(1))
    assert not front.may_inline()
    await front.submit(ticket(1))
    assert front.may_inline()
    front.add_inline_us(100.0)
    assert not front.may_inline(), "enough inline work: the loop gets a turn"
    await front.submit(ticket(1))
    assert front.may_inline()

    seen: list[bool] = []

    async def other() -> None:
        await front.submit(ticket(1))
        seen.append(front.may_inline())

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    assert not front.may_inline()
    await task
    assert seen == [False]
    for _ in range(3):
        await asyncio.sleep(0)
    assert front.may_inline()


@pytest.mark.asyncio
async def test_a_poisoned_caller_fails_alone(worker: Worker) -> None:
    """One bad call among 64 gets the error, 63 get their results."""
    device = Device()
    fronts = LoopDrivers(device, worker)

    async def caller(value: Any) -> Any:
        return await fronts.current().submit(ticket(value))

    values = [*range(40), "poison", *range(41, 64)]
    results = await asyncio.gather(*(caller(value) for value in values), return_exceptions=True)
    assert isinstance(results[40], ValueError)
    assert [r for i, r in enumerate(results) if i != 40] == [2 * i for i in range(64) if i != 40]
    assert fronts.current().batcher.stats.failed == 1


@pytest.mark.asyncio
async def test_a_full_lane_rejects_or_lets_wait_in_order(worker: Worker) -> None:
    """With `reject` the third call is refused with a time; with `wait` all run, in the order of arrival."""
    fronts = LoopDrivers(
        Device(), worker, Settings(max_queue_size=2, max_batch_size=1, queue_full_policy="reject")
    )
    front = fronts.current()
    kept = [front.submit(ticket(i)) for i in range(2)]
    with pytest.raises(OverloadedError) as refused:
        front.submit(ticket(2))
    assert refused.value.retry_after > 0
    assert [await t for t in kept] == [0, 2]
    patient = LoopDriver(
        asyncio.get_running_loop(),
        Device(),
        worker,
        Settings(max_queue_size=2, max_batch_size=1, queue_full_policy="wait"),
    )
    order: list[int] = []

    async def caller(value: int) -> None:
        await patient.submit(ticket(value))
        order.append(value)

    await asyncio.gather(*(caller(i) for i in range(10)))
    assert order == list(range(10))
    assert settled(patient)


def test_a_call_that_is_too_late_never_runs() -> None:
    """A deadline that passes in the queue is an error of its own; the device saw only the call before."""
    device, there = Device(), Held()

    async def main() -> LoopDriver:
        loop = asyncio.get_running_loop()
        front = LoopDriver(loop, device, there)  # type: ignore[arg-type]
        first = asyncio.ensure_future(_awaited(front, ticket(1, us=DEAR)))
        await until(lambda: there.jobs)
        at = loop.time()
        with pytest.raises(DeadlineExceededError):
            await front.submit(ticket(2, us=DEAR, deadline=at + 10.0))
        assert 10.0 <= loop.time() - at < 10.1
        there.jobs.pop()()
        assert await first == 2
        return front

    front = run_virtually(main())
    assert device.runs == [1]
    assert settled(front)


class Held:
    """A worker that keeps its jobs until a test runs them."""

    inside = False

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)


async def _awaited(front: LoopDriver, call: PendingCall) -> Any:
    return await front.submit(call)


@pytest.mark.asyncio
async def test_draining_lets_known_callers_end_and_refuses_new_ones(worker: Worker) -> None:
    """A request in the middle of its program ends; a new task is refused; afterwards nothing is left."""
    fronts = LoopDrivers(Device(), worker)
    front = fronts.current()

    async def request() -> int:
        value = 1
        for _ in range(5):
            value = await front.submit(ticket(value))
        return value

    known = asyncio.create_task(request())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    draining = asyncio.create_task(fronts.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeClosedError):
        front.submit(ticket(1))
    assert await draining
    assert await known == 32
    assert front.state == "stopped"
    with pytest.raises(RuntimeClosedError):
        fronts.current().submit(ticket(1))


def test_every_loop_has_its_own_front(worker: Worker) -> None:
    """A second run, two loops in two threads and a loop after a closed one work; old loop drivers are
    dropped."""
    fronts = LoopDrivers(Device(), worker)

    async def run() -> int:
        calls = [fronts.current().submit(ticket(i, us=us)) for i, us in enumerate((CHEAP, DEAR))]
        return sum([await call for call in calls])

    results = [asyncio.run(run()) for _ in range(3)]
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(run()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [2] * 5
    assert asyncio.run(run()) == 2
    assert len(fronts.by_loop) == 1
    assert fronts.stats().done == 12


@pytest.mark.asyncio
async def test_staggered_callers_walk_together(worker: Worker) -> None:
    """Callers that start at different turns meet: batches hold many of them, inline and on the worker."""
    device = Device()
    front = LoopDriver(asyncio.get_running_loop(), device, worker)

    async def request(delay: int) -> int:
        for _ in range(delay):
            await asyncio.sleep(0)
        value = 1
        for step in range(400):
            value = await front.submit(ticket(value, group=step % 10, us=CHEAP if step % 3 else DEAR)) % 1009
        return value

    results = await asyncio.gather(*(request(delay * 3) for delay in range(32)))
    assert set(results) == {pow(2, 400, 1009)}
    assert front.batcher.stats.mean_batch > 8
    assert settled(front)


SECRET: ContextVar[str] = ContextVar("SECRET", default="unset")


@pytest.mark.asyncio
async def test_a_batch_runs_in_nobodys_context(worker: Worker) -> None:
    """A caller's context variables reach its own continuation, never the batch it happens to start."""
    seen: list[str] = []

    class Looks(Device):
        """Notes the context variable of where it runs."""

        spans = None

        def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
            seen.append(SECRET.get())
            return super().execute(op, calls, modes, snapshot)

    SECRET.set("whoever made the front")
    front = LoopDriver(asyncio.get_running_loop(), Looks(), worker)

    async def caller(name: str) -> str:
        SECRET.set(name)
        await front.submit(ticket(1))
        await front.submit(ticket(1, us=DEAR))
        return SECRET.get()

    assert await asyncio.gather(*(caller(name) for name in "abc")) == list("abc")
    assert seen == ["unset", "unset"]


@pytest.mark.asyncio
async def test_an_error_of_the_device_reaches_every_caller_with_a_short_traceback(worker: Worker) -> None:
    """Callers that share one error each see where it was raised, not one another's frames."""
    device = Device()
    front = LoopDriver(asyncio.get_running_loop(), device, worker)
    op = Double(pure=False)

    async def caller() -> Any:
        return await front.submit(PENDING_CALL.cls(op, ("poison",), "g", CHEAP))

    depths = []
    for task in [asyncio.create_task(caller()) for _ in range(8)]:
        with pytest.raises(ValueError, match="poisoned") as raised:
            await task
        depths.append(len(raised.traceback))
    assert device.runs == [8]
    assert max(depths) == min(depths)


@pytest.mark.asyncio
async def test_a_closed_worker_fails_what_it_should_have_run() -> None:
    """Dear work for a worker that is closed is an error for its caller, not a hang."""
    closed = Worker("closed")
    closed.close()
    front = LoopDriver(asyncio.get_running_loop(), Device(), closed)
    with pytest.raises(RuntimeClosedError):
        await front.submit(ticket(1, us=DEAR))
    assert await front.submit(ticket(1)) == 2


@pytest.mark.asyncio
async def test_closing_leaves_no_task_timer_or_callback(worker: Worker) -> None:
    """After close the loop holds nothing of the loop driver: it can be collected."""
    loop = asyncio.get_running_loop()
    front = LoopDriver(loop, Device(), worker)
    assert await front.submit(ticket(1, deadline=loop.time() + 3600)) == 2
    watched = weakref.ref(front)
    assert front.callers == 1
    front.close()
    front.close()
    del front
    await asyncio.sleep(0)
    gc.collect()
    assert watched() is None
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_fronts_of_its_own(worker: Worker) -> None:
    """A child forked while the parent's loop waits for a batch serves a loop of its own on its own thread."""
    gate = threading.Event()
    device = Device(gate)
    fronts = LoopDrivers(device, worker)

    async def call(value: int) -> Any:
        return await fronts.current().submit(ticket(value, us=DEAR))

    async def parent() -> tuple[Any, int]:
        mine = asyncio.create_task(call(3))
        await until(device.entered.is_set)
        fronts._lock.acquire()  # as another thread may hold it at the moment of the fork
        child = os.fork()
        if child == 0:
            os._exit(in_child())
        fronts._lock.release()
        gate.set()
        return await mine, child

    def in_child() -> int:
        answers: list[int] = []
        device.gate = None
        thread = threading.Thread(target=lambda: answers.append(asyncio.run(call(4))))
        thread.start()
        thread.join(30)
        return 0 if answers == [8] else 1

    result, child = asyncio.run(parent())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert result == 6


@pytest.mark.asyncio
async def test_nobody_runs_inline_beside_a_batch_that_was_left(worker: Worker) -> None:
    """A launched batch whose caller has gone may still write memory that the next caller was given."""
    gate = threading.Event()
    device = Device(gate)
    fronts = LoopDrivers(device, worker)
    leaver = asyncio.ensure_future(_call(fronts, DEAR))
    await until(device.entered.is_set)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver

    async def stayer() -> tuple[bool, bool]:
        front = fronts.current()
        front.cancel(front.submit(ticket(2)))  # makes this task known, and the only one
        for _ in range(5):
            await asyncio.sleep(0)
        beside = front.may_inline()
        gate.set()
        await until(lambda: not front.batcher.inflight_batches)
        for _ in range(5):
            await asyncio.sleep(0)
        return beside, front.may_inline()

    try:
        assert await asyncio.ensure_future(stayer()) == (False, True)
    finally:
        gate.set()
    assert settled(fronts.current())


@pytest.mark.asyncio
async def test_who_leaves_a_launched_call_is_no_longer_alone(worker: Worker) -> None:
    """The only task loses its right to run inline while a batch that it took back still runs."""
    gate = threading.Event()
    fronts = LoopDrivers(Device(gate), worker)
    front = fronts.current()

    async def only() -> tuple[bool, bool]:
        await _call(fronts, CHEAP)
        for _ in range(3):
            await asyncio.sleep(0)
        alone = front.may_inline()
        gate.clear()
        launched = front.submit(ticket(1, us=DEAR))
        await until(lambda: front.batcher.inflight_batches)
        front.cancel(launched)
        for _ in range(3):
            await asyncio.sleep(0)
        return alone, front.may_inline()

    gate.set()
    try:
        assert await asyncio.ensure_future(only()) == (True, False)
    finally:
        gate.set()
    await until(lambda: not front.batcher.inflight_batches)
    assert settled(front)


async def _call(fronts: LoopDrivers, us: float) -> Any:
    return await fronts.current().submit(ticket(1, us=us))
