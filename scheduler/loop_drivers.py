"""The fronts of a device, one for each event loop, and the wait for a flight from such a loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

from layerzero._util import log
from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.device.worker import Worker
from layerzero.native import HOT
from layerzero.scheduler.core.bisect import Executor
from layerzero.scheduler.core.limits import Stats
from layerzero.scheduler.loop_driver import LOOP_LOST, RUN_AHEAD, Front
from layerzero.scheduler.single_flight import Flight
from layerzero.scheduler.streams import HOST, Streams
from layerzero.scheduler.task_modes import CARRYING
from layerzero.scheduler.torch_modes import capture
from layerzero.spec.errors import RuntimeClosedError
from layerzero.spec.settings import Settings

MODES_SHARED = "front.modes_shared"


class _Factory:
    """Makes a loop's tasks as `before` did, each with torch's modes to itself, while it has `users`."""

    __slots__ = ("before", "users")

    def __init__(self, before: Any) -> None:
        self.before = before
        self.users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        if asyncio.iscoroutine(coro):
            coro = CARRYING.kind(coro)
        if self.before is None:
            return asyncio.Task(coro, loop=loop, **options)
        return self.before(loop, coro, **options)


def begin_carrying(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop | None:
    """Give every task that `loop`, or the running one, makes from now on torch's modes of its creation.

    The loop; None where none of asyncio's runs.
    """
    if loop is None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # another library's: it has no fronts either
            return None
    factory: Any = loop.get_task_factory()
    if not isinstance(factory, _Factory):
        factory = _Factory(factory)
        loop.set_task_factory(factory)
    factory.users += 1
    return loop


def end_carrying(loop: asyncio.AbstractEventLoop) -> None:
    """Make tasks as before, once everybody who began has ended."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, _Factory):
        factory.users -= 1
        if not factory.users:
            loop.set_task_factory(factory.before)


def _tell_shared(loop: asyncio.AbstractEventLoop) -> None:
    """Log where a loop's first call comes under a mode that tasks from before it may find in force, too."""
    modes = capture()
    if (modes.inference or modes.autocast) and not CARRYING.here() and len(asyncio.all_tasks(loop)) > 1:
        why = (
            "tasks made before a loop's first awaited call share torch's modes; inside "
            "`async with layerzero.start()` every task has its own"
        )
        log.warning(MODES_SHARED, modes=repr(modes), why=why)


def _shut(front: Front) -> None:
    end_carrying(front.loop)
    front.close()


class Fronts:
    """One front for every event loop that uses a device, made at its first use there.

    A front of a closed loop is dropped when the next one is made. Thread-safe.
    """

    __slots__ = (
        "__weakref__", "_across", "_always_inline", "_closed", "_executor", "_lock", "_past", "_settings",
        "_worker",
        "by_loop",
    )  # fmt: skip

    def __init__(
        self,
        executor: Executor,
        worker: Worker,
        settings: Settings | None = None,
        *,
        always_inline: bool = False,
        across: Streams | None = None,
    ) -> None:
        self._across = across
        self._executor = executor
        self._worker = worker
        self._settings = settings or Settings()
        self._always_inline = always_inline
        self.by_loop: dict[asyncio.AbstractEventLoop, Front] = {}
        self._past = Stats()
        self._closed = False
        self._lock = threading.Lock()
        renew_after_fork(self)

    def current(self) -> Front:
        """The running loop's front.

        Raises: RuntimeError: no loop runs in this thread; RuntimeClosedError: closed.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "an awaited call needs a running asyncio event loop in this thread, got none (trio runs its "
                "own kind); lz.sync has the same ops, blocking"
            ) from None
        front = self.by_loop.get(loop)
        return front if front is not None else self._open(loop)

    def _open(self, loop: asyncio.AbstractEventLoop) -> Front:
        with self._lock:
            if self._closed:
                raise RuntimeClosedError("the runtime is closed")
            for old in [known for known in self.by_loop if known.is_closed()]:
                front = self.by_loop.pop(old)
                front.close()
                self._past.add(front.lane.stats)
            HOT.start()
            begin_carrying(loop)
            _tell_shared(loop)
            front = self.by_loop[loop] = Front(
                loop,
                self._executor,
                self._worker,
                self._settings,
                always_inline=self._always_inline,
                across=self._across,
            )
        return front

    def set_settings(self, settings: Settings) -> None:
        """Put other limits in force: at once on a front of this thread, on others with their next turn."""
        with self._lock:
            self._settings = settings
            if self._across is not None:
                self._across.completion = settings.completion
            fronts = list(self.by_loop.values())
        for front in fronts:
            if front.loop is asyncio._get_running_loop():
                self._follow(front)
                continue
            with suppress(RuntimeError):  # its loop is closed, so nothing runs there
                front.loop.call_soon_threadsafe(self._follow, front)

    def _follow(self, front: Front) -> None:
        """On a front's own thread: go by the settings of now; who waits for room gets what there is more."""
        settings, caps = self._settings, front.lane.caps
        caps.follow(settings)
        host = self._across is not None and self._across.completion == HOST
        caps.ahead = front._ahead = RUN_AHEAD if host else 1
        if not self._always_inline:
            front.inline_limit_us = settings.inline_limit_us
        front._max_inline_us = settings.max_inline_us
        front.lane._admit()

    def stats(self) -> Stats:
        """What all fronts have counted, those of closed loops included."""
        with self._lock:
            total = Stats()
            for stats in (self._past, *(front.lane.stats for front in self.by_loop.values())):
                total.add(stats)
        return total

    async def drain(self, timeout_s: float) -> bool:
        """Drain the running loop's front, close the others; False if callers were cut off."""
        front = self.by_loop.get(asyncio.get_running_loop())
        in_time = await front.drain(timeout_s) if front is not None else True
        self.close()
        return in_time

    def close(self) -> None:
        """Close every front, each on its own loop's thread."""
        with self._lock:
            self._closed = True
            fronts = list(self.by_loop.values())
        for front in fronts:
            try:
                front.loop.call_soon_threadsafe(_shut, front)
            except RuntimeError:  # its loop is closed, so nothing runs there
                front.close()

    def after_fork(self) -> None:
        """In a forked child: forget the parent's loops."""
        self._lock = threading.Lock()
        self.by_loop = {}


async def join(flight: Flight[Any]) -> Any:
    """Wait for a flight from a coroutine; a cancelled waiter leaves it alone, its error is raised here."""
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[None] = loop.create_future()

    def land() -> None:
        if not landed.done():
            landed.set_result(None)

    def told() -> None:
        try:
            loop.call_soon_threadsafe(land)
        except RuntimeError:
            log.warning(LOOP_LOST, key=repr(flight.key))

    flight.add(told)
    try:
        await landed
    finally:
        flight.leave(told)
    return flight.result()
