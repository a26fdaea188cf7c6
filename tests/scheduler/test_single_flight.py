"""One computation a key, however many threads and tasks ask, and whoever of them goes away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.single_flight import Flight, SingleFlight
from layerzero.spec.errors import SelectionTimeoutError
from tests.waiting import LIMIT_S


class Slow:
    """A computation that starts, waits for `release` and counts itself."""

    def __init__(self) -> None:
        self.count = 0
        self.started = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> int:
        self.count += 1
        self.started.set()
        assert self.release.wait(30)
        return 42


async def join(flight: Flight[Any]) -> Any:
    """Wait for a flight from a coroutine; a cancelled waiter leaves it alone, its error is raised here."""
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[None] = loop.create_future()

    def land() -> None:
        if not landed.done():
            landed.set_result(None)

    flight.future.add_done_callback(lambda _: loop.call_soon_threadsafe(land))
    try:
        await landed
    finally:
        flight.leave()
    return flight.result()


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread brings about."""
    limit = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_500_threads_and_1000_tasks_compute_once(worker: Worker) -> None:
    """Sync and async callers of one key share one computation and all get its value."""
    flights: SingleFlight[int] = SingleFlight(worker.submit)
    slow = Slow()
    results: list[int] = []

    def thread_caller() -> None:
        results.append(flights.flight("key", slow).wait(60))

    async def task_callers() -> Any:
        return await asyncio.gather(*(join(flights.flight("key", slow)) for _ in range(1000)))

    threads = [threading.Thread(target=thread_caller) for _ in range(500)]
    loops = [threading.Thread(target=lambda: results.extend(asyncio.run(task_callers())))]
    for thread in threads + loops:
        thread.start()
    assert slow.started.wait(30)
    flight = flights._flights["key"]
    until(lambda: flight.claims == 1500)
    slow.release.set()
    for thread in threads + loops:
        thread.join(60)
    assert slow.count == 1
    assert results == [42] * 1500
    assert len(flights) == 0 and flight.claims == 0


def test_errors_are_shared_and_not_kept(worker: Worker) -> None:
    """Every caller of a failing flight gets its error; the next call computes anew."""
    flights: SingleFlight[int] = SingleFlight(worker.submit)
    gate = threading.Event()

    def fail() -> int:
        gate.wait(30)
        raise ZeroDivisionError("a computation of ours")

    async def main() -> list[Any]:
        waiting = asyncio.gather(
            *(join(flights.flight("key", fail)) for _ in range(10)), return_exceptions=True
        )
        await asyncio.sleep(0)
        gate.set()
        return await waiting

    outcomes = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 10
    with pytest.raises(ZeroDivisionError):
        flights.flight("key", fail).wait(10)
    assert flights.flight("key", lambda: 7).wait(10) == 7


async def naive_leader(shared: dict[str, asyncio.Future[int]], compute: Callable[[], int], steps: int) -> Any:
    """What single flight must not be: the first caller computes and the others wait for its future."""
    if "key" in shared:
        return await shared["key"]
    future = shared["key"] = asyncio.get_running_loop().create_future()
    for _ in range(steps):
        await asyncio.sleep(0)
    future.set_result(compute())
    return await future


async def own_flight(flights: SingleFlight[int], compute: Callable[[], int]) -> int:
    """Single flight as it is here."""
    value: int = await join(flights.flight("key", compute))
    return value


async def cancel_leader_at(point: int, caller: Callable[[], Any]) -> list[Any]:
    """Start a leader and four followers, cancel the leader after `point` turns; what the followers got."""
    leader = asyncio.create_task(caller())
    await asyncio.sleep(0)
    followers = [asyncio.create_task(caller()) for _ in range(4)]
    for _ in range(point):
        await asyncio.sleep(0)
    leader.cancel()
    await asyncio.wait([leader], timeout=1)
    done, left = await asyncio.wait(followers, timeout=0.2)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return [task.result() if task in done and not task.cancelled() else "stranded" for task in followers]


@pytest.mark.parametrize("point", range(5))
def test_a_cancelled_leader_strands_nobody(worker: Worker, point: int) -> None:
    """Whenever the first caller is cancelled, the others get the value of one computation."""
    flights: SingleFlight[int] = SingleFlight(worker.submit)
    count: list[int] = []

    def compute() -> int:
        count.append(1)
        time.sleep(0.005)
        return 42

    results = asyncio.run(cancel_leader_at(point, lambda: own_flight(flights, compute)))
    assert results == [42] * 4
    assert len(count) == 1
    assert len(flights) == 0


def test_the_naive_version_strands_its_followers() -> None:
    """The control: with the leader's own future, cancelling it leaves followers without an answer."""
    stranded = 0
    for point in range(5):
        shared: dict[str, asyncio.Future[int]] = {}

        def caller(shared: dict[str, asyncio.Future[int]] = shared) -> Any:
            return naive_leader(shared, lambda: 42, steps=3)

        stranded += asyncio.run(cancel_leader_at(point, caller)) != [42] * 4
    assert stranded >= 2


def test_the_last_to_leave_takes_back_what_has_not_started(worker: Worker) -> None:
    """A queued computation nobody waits for never runs, and a later call starts a new one."""
    flights: SingleFlight[int] = SingleFlight(worker.submit)
    blocked = threading.Event()
    worker.submit(blocked.wait)
    ran: list[str] = []

    def compute(name: str) -> int:
        ran.append(name)
        return 1

    async def give_up() -> None:
        tasks = [asyncio.create_task(join(flights.flight("key", lambda: compute("first")))) for _ in range(3)]
        await asyncio.sleep(0)
        for index, task in enumerate(tasks):
            assert len(flights) == 1, index
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert len(flights) == 0

    asyncio.run(give_up())
    later = flights.flight("key", lambda: compute("second"))
    blocked.set()
    assert later.wait(10) == 1
    assert ran == ["second"]


def test_a_running_computation_goes_on_without_callers(worker: Worker) -> None:
    """Who times out leaves; who comes while it still runs joins it."""
    flights: SingleFlight[int] = SingleFlight(worker.submit)
    slow = Slow()
    with pytest.raises(SelectionTimeoutError, match="key"):
        flights.flight("key", slow).wait(0.05)
    assert slow.started.wait(10)
    again = flights.flight("key", slow)
    slow.release.set()
    assert again.wait(10) == 42
    assert slow.count == 1


def test_a_start_that_fails_is_everybodys_error() -> None:
    """If nobody can take the computation, the caller gets that error and the key is free again."""

    def refuse(run: Callable[[], None]) -> None:
        raise RuntimeError("no thread")

    flights: SingleFlight[int] = SingleFlight(refuse)
    with pytest.raises(RuntimeError, match="no thread"):
        flights.flight("key", lambda: 1)
    assert len(flights) == 0


def test_a_landed_flight_answers_late_waiters(worker: Worker) -> None:
    """Waiting for a flight that has already ended returns at once, in threads and in tasks."""
    flights: SingleFlight[int] = SingleFlight(worker.submit)
    flight = flights.flight("key", lambda: 5)
    until(flight.future.done)
    assert flight.wait(0) == 5
    assert asyncio.run(join(flight)) == 5
