"""Ways of writing a request of many steps, and the batches in which a crowd of such requests is served.

What is counted is the mean batch of requests that came one by one, over what their style allows at once: no
seconds, only sizes, on a virtual clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import anyio
import torch

from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.spawn import spawn
from layerzero.spec.settings import Settings
from tests.clocks import run_virtually
from tests.scheduler.devices import Device, Double
from tests.scheduler.test_expected_callers import PASS_S

CALLERS = 16
STEPS = 24
NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")


class Thread:
    """A worker whose jobs take a pass each, one after another."""

    inside = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free_at = 0.0

    def submit(self, job: Callable[[], object]) -> None:
        self._free_at = max(self._free_at, self._loop.time()) + PASS_S
        self._loop.call_at(self._free_at, job)


class OnLoop(Device):
    """Computes on the loop's thread, a pass a batch."""

    spans = None

    def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
        loop: Any = asyncio.get_running_loop()
        loop.spend(PASS_S)
        return super().execute(op, calls, modes, snapshot)


class Host:
    """A front of the running loop on the CPU: batches run on a thread, short ones on the loop's."""

    def __init__(self, short: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.device = OnLoop() if short else Device()
        self.expected_us = 1.0 if short else float("inf")
        thread: Any = Thread(self.loop)
        self.front = LoopDriver(self.loop, self.device, thread, Settings(max_inline_us=0.0))

    async def token(self, group: str = "step") -> float:
        """One step; its result is on the host."""
        call: PendingCall = PENDING_CALL.cls(OP, (torch.ones(1),), group, self.expected_us)
        return float(await self.front.submit(call))

    step = token


OP = Double()


class Sizes(list[int]):
    """The sizes of the batches that ran while every request was there."""

    def __init__(self) -> None:
        self.requests = 0

    def append(self, size: int) -> None:
        """A batch has run."""
        if self.requests == CALLERS:
            super().append(size)


Token = Callable[[], Coroutine[Any, Any, float]]


class Crowd:
    """What the requests of one crowd share: how they step, and their places."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.token: Token = machine.token
        self.places = asyncio.Semaphore(3 * CALLERS // 4)


async def plainly(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await crowd.token()


async def cancelled_and_retried(crowd: Crowd, number: int) -> None:
    """Each step is a task; some are taken back while they queue, some while they run."""
    draw = random.Random(number)
    for _ in range(STEPS):
        task = asyncio.ensure_future(crowd.token())
        if draw.random() < 0.2:
            await asyncio.sleep(draw.choice((0.0, PASS_S / 2)))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            task = asyncio.ensure_future(crowd.token())
        await task


async def in_a_task_group(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.token())


async def in_a_group_of_anyio(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        async with anyio.create_task_group() as group:
            group.start_soon(crowd.token)


async def by_piped_generators(crowd: Crowd, number: int) -> None:
    async def tokens() -> AsyncIterator[float]:
        for _ in range(STEPS):
            yield await crowd.token()

    async def pieces(source: AsyncIterator[float]) -> AsyncIterator[str]:
        async for token in source:
            yield str(token)

    async for _ in pieces(tokens()):
        pass


async def under_new_context(crowd: Crowd, number: int) -> None:
    for step in range(STEPS):
        NAME.set(f"{number} {step}")
        await crowd.token()
        assert NAME.get() == f"{number} {step}"


async def under_a_timeout(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        async with asyncio.timeout(1e3):
            await crowd.token()


async def by_wait_for(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await asyncio.wait_for(crowd.token(), 1e3)


async def under_a_scope_of_anyio(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        with anyio.fail_after(1e3):
            await crowd.token()


async def behind_a_semaphore(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        async with crowd.places:
            await crowd.token()


async def a_place_a_request(crowd: Crowd, number: int) -> None:
    async with crowd.places:
        await plainly(crowd, number)


async def over_a_queue(crowd: Crowd, number: int) -> None:
    queue: asyncio.Queue[float | None] = asyncio.Queue(1)

    async def produce() -> None:
        for _ in range(STEPS):
            await queue.put(await crowd.token())
        await queue.put(None)

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        while await queue.get() is not None:
            pass


async def asked_over_a_queue(crowd: Crowd, number: int) -> None:
    """A consumer that asks a producer for each step."""
    asks: asyncio.Queue[asyncio.Future[float] | None] = asyncio.Queue()

    async def serve() -> None:
        while (ask := await asks.get()) is not None:
            ask.set_result(await crowd.token())

    serving = asyncio.ensure_future(serve())
    for _ in range(STEPS):
        ask: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        asks.put_nowait(ask)
        await ask
    asks.put_nowait(None)
    await serving


async def by_gather(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await asyncio.gather(crowd.token(), crowd.token())


async def by_gather_of_two_ops(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await asyncio.gather(crowd.token(), crowd.machine.token("other"))


async def by_wait(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await asyncio.wait([asyncio.ensure_future(crowd.token())], return_when=asyncio.FIRST_COMPLETED)


async def as_completed(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        for done in asyncio.as_completed([crowd.token(), crowd.token()]):
            await done


async def shielded(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await asyncio.shield(crowd.token())


async def by_callbacks(crowd: Crowd, number: int) -> None:
    """No coroutine goes from step to step: the end of each begins the next."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def begin(step: int) -> None:
        asyncio.ensure_future(crowd.token()).add_done_callback(lambda _: follow(step))

    def follow(step: int) -> None:
        if step + 1 < STEPS:
            begin(step + 1)
        else:
            ended.set_result(None)

    begin(0)
    await ended


async def from_task_to_task(crowd: Crowd, number: int) -> None:
    """Each step's task makes the next one and ends."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks: set[asyncio.Future[None]] = set()

    async def step(left: int) -> None:
        await crowd.token()
        if left:
            tasks.add(asyncio.ensure_future(step(left - 1)))
        else:
            ended.set_result(None)

    tasks.add(asyncio.ensure_future(step(STEPS - 1)))
    await ended


async def raising_between(crowd: Crowd, number: int) -> None:
    draw = random.Random(number)
    for _ in range(STEPS):
        try:
            await crowd.token()
            if draw.random() < 0.3:
                raise ValueError("a bad token")
        except ValueError:
            await asyncio.sleep(0)


async def under_a_lock(crowd: Crowd, number: int) -> None:
    """A condition that a second task of the request waits for after each step."""
    condition, done = asyncio.Condition(), 0

    async def watch() -> None:
        async with condition:
            await condition.wait_for(lambda: done == STEPS)

    watching = asyncio.ensure_future(watch())
    for _ in range(STEPS):
        await crowd.token()
        async with condition:
            done += 1
            condition.notify_all()
    await watching


async def by_call_later(crowd: Crowd, number: int) -> None:
    """Waits by a timer of the loop that is due at once."""
    loop = asyncio.get_running_loop()
    for _ in range(STEPS):
        await crowd.token()
        due: asyncio.Future[None] = loop.create_future()
        loop.call_later(0.0, due.set_result, None)
        await due


async def of_uneven_turns(crowd: Crowd, number: int) -> None:
    """Some requests need more turns of the loop between two steps than others."""
    for _ in range(STEPS):
        await crowd.token()
        for _ in range(number % 5):
            await asyncio.sleep(0)


async def spawned(crowd: Crowd, number: int) -> None:
    await spawn(crowd.machine.front, plainly(crowd, number))


async def spawned_for_each_step(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await spawn(crowd.machine.front, crowd.token())


async def all_layers_in_a_task(crowd: Crowd, number: int) -> None:
    """A step is several ops, and a task."""

    async def step() -> None:
        for group in ("embed", "layer", "layer"):
            await crowd.machine.step(group)
        await crowd.machine.token("sample")

    for _ in range(STEPS):
        await asyncio.wait_for(step(), 1e3)


async def a_task_for_each_op(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        for group in ("embed", "layer", "layer"):
            await asyncio.wait_for(crowd.machine.step(group), 1e3)
        await asyncio.wait_for(crowd.machine.token("sample"), 1e3)


async def two_models_by_wait_for(crowd: Crowd, number: int) -> None:
    for _ in range(STEPS):
        await asyncio.wait_for(crowd.machine.token("step" if number % 2 else "other"), 1e3)


Request = Callable[[Crowd, int], Coroutine[Any, Any, None]]
ONE_AT_ONCE: tuple[Request, ...] = (
    plainly, cancelled_and_retried, in_a_task_group, in_a_group_of_anyio, by_piped_generators,
    under_new_context, under_a_timeout, by_wait_for, under_a_scope_of_anyio, over_a_queue,
    asked_over_a_queue, by_gather_of_two_ops, by_wait, shielded, by_callbacks, from_task_to_task,
    raising_between, under_a_lock, by_call_later, of_uneven_turns, spawned, spawned_for_each_step,
    all_layers_in_a_task, a_task_for_each_op,
)  # fmt: skip
# Each style, and what it allows at once of all callers: a semaphore three quarters, a gather two calls each.
STYLES: dict[str, tuple[Request, float]] = {
    style.__name__.replace("_", " "): (style, 1.0) for style in ONE_AT_ONCE
}
STYLES |= {
    "behind a semaphore": (behind_a_semaphore, 0.75),
    "a place a request": (a_place_a_request, 0.75),
    "two models by wait for": (two_models_by_wait_for, 0.5),
    "by gather": (by_gather, 2.0),
    "as completed": (as_completed, 2.0),
}


def mean_batch(style: str, make: Callable[[], Any]) -> tuple[float, list[int]]:
    """The mean batch of a style's crowd, over what it allows at once; the sizes of all batches.

    Only batches count that ran while all requests were there, without the first half of them.
    """
    request, allowed = STYLES[style]

    async def main() -> Sizes:
        machine = make()
        crowd = Crowd(machine)
        sizes = machine.device.runs = Sizes()

        async def client(number: int) -> None:
            await asyncio.sleep(number * PASS_S / 4)
            sizes.requests += 1
            await request(crowd, number)
            sizes.requests -= CALLERS

        await asyncio.gather(*map(client, range(CALLERS)))
        return sizes

    runs = run_virtually(main())
    steady = runs[len(runs) // 2 :]
    return sum(steady) / len(steady) / (allowed * CALLERS), runs
