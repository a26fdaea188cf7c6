"""The loop drivers of a device, one for each event loop, and the wait for a flight from such a loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from layerzero._util import log
from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.device.worker import Worker
from layerzero.native import FAST_PATH
from layerzero.scheduler.core.bisect import Executor
from layerzero.scheduler.core.limits import BatcherStats
from layerzero.scheduler.loop_driver import MAX_INFLIGHT_ON_HOST, LoopDriver
from layerzero.scheduler.modes.streams import HOST, DeviceStreams, HostReader
from layerzero.scheduler.modes.task_modes import TASK_MODES
from layerzero.scheduler.modes.torch_modes import capture
from layerzero.scheduler.watching import BatchWatch
from layerzero.spec.errors import RuntimeClosedError
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.observe.timeline import Timeline

MODES_SHARED = "loop_driver.modes_shared"


class _TaskFactory:
    """Makes a loop's tasks as `before` did, each with torch's modes to itself, while it has `users`."""

    __slots__ = ("previous", "users")

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        if coro.__class__ is CoroutineType or asyncio.iscoroutine(coro):
            coro = TASK_MODES.isolate(coro)
        if self.previous is None:
            return asyncio.Task(coro, loop=loop, **options)
        return self.previous(loop, coro, **options)


def isolate_task_modes(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop | None:
    """Give every task that `loop`, or the running one, makes from now on torch's modes of its creation.

    The loop; None where none of asyncio's runs.
    """
    if loop is None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            trio_run()  # whose tasks from now on are isolated, too
            return None
    factory: Any = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        factory = _TaskFactory(factory)
        loop.set_task_factory(factory)
    factory.users += 1
    return loop


def stop_isolating_task_modes(loop: asyncio.AbstractEventLoop) -> None:
    """Make tasks as before, once everybody who began has ended."""
    factory: Any = loop.get_task_factory()
    if isinstance(factory, _TaskFactory):
        factory.users -= 1
        if not factory.users:
            loop.set_task_factory(factory.previous)


def trio_run() -> Any:
    """The trio run in this thread, or None; without trio in the program nothing is imported."""
    if "trio" not in sys.modules:
        return None
    from layerzero.scheduler.trio_driver import current_loop

    return current_loop()


def _warn_shared_modes(loop: asyncio.AbstractEventLoop) -> None:
    """Log where a loop's first call comes under a mode that tasks from before it may find in force, too."""
    modes = capture()
    if (
        (modes.inference or modes.autocast)
        and not TASK_MODES.is_isolated()
        and len(asyncio.all_tasks(loop)) > 1
    ):
        why = (
            "tasks made before a loop's first awaited call share torch's modes; inside "
            "`async with layerzero.start()` every task has its own"
        )
        log.warning(MODES_SHARED, modes=repr(modes), why=why)


def _close_driver(driver: LoopDriver) -> None:
    if not driver.foreign:
        stop_isolating_task_modes(driver.loop)
    driver.close()


class LoopDrivers:
    """One front for every event loop that uses a device, made at its first use there.

    A loop driver of a closed loop is dropped when the next one is made. Thread-safe.
    """

    __slots__ = (
        "__weakref__", "_always_inline", "_closed", "_closed_stats", "_executor", "_lock", "_make_reader",
        "_settings", "_streams", "_timeline", "_worker", "by_loop",
    )  # fmt: skip

    def __init__(
        self,
        executor: Executor,
        worker: Worker,
        settings: Settings | None = None,
        *,
        always_inline: bool = False,
        streams: DeviceStreams | None = None,
        make_reader: Callable[[LoopDriver], HostReader] | None = None,
    ) -> None:
        self._streams = streams
        self._make_reader = make_reader
        self._executor = executor
        self._worker = worker
        self._settings = settings or Settings()
        self._always_inline = always_inline
        self.by_loop: dict[Any, LoopDriver] = {}  # asyncio's loops, and runs of trio
        self._closed_stats = BatcherStats()
        self._closed = False
        self._timeline: tuple[Timeline, str] | None = None  # with what it calls the device
        self._lock = threading.Lock()
        renew_after_fork(self)

    def current(self) -> LoopDriver:
        """The running loop's front.

        Raises: RuntimeError: no loop runs in this thread; RuntimeClosedError: closed.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._current_of_trio()
        driver = self.by_loop.get(loop)
        return driver if driver is not None else self._open(loop)

    def _current_of_trio(self) -> LoopDriver:
        """The front of the trio run in this thread."""
        loop = trio_run()
        if loop is None:
            raise RuntimeError(
                "an awaited call needs a running event loop of asyncio or trio in this thread, got none; "
                "lz.sync has the same ops, blocking"
            )
        driver = self.by_loop.get(loop)
        return driver if driver is not None else self._open(loop)

    def _open(self, loop: Any) -> LoopDriver:
        with self._lock:
            if self._closed:
                raise RuntimeClosedError("the runtime is closed")
            for old in [other for other in self.by_loop if other.is_closed()]:
                driver = self.by_loop.pop(old)
                driver.close()
                self._closed_stats.add(driver.batcher.stats)
            FAST_PATH.start()
            kind = LoopDriver
            if isinstance(loop, asyncio.AbstractEventLoop):
                isolate_task_modes(loop)
                _warn_shared_modes(loop)
            else:
                from layerzero.scheduler.trio_driver import TrioDriver

                kind = TrioDriver
            driver = self.by_loop[loop] = kind(
                loop,
                self._executor,
                self._worker,
                self._settings,
                always_inline=self._always_inline,
                streams=self._streams,
                make_reader=self._make_reader,
            )
            driver.on_interrupted = self._replace
            self._watch(driver)
        return driver

    def _replace(self, driver: LoopDriver) -> None:
        """On its own thread: have the next call of a driver's loop make another one."""
        with self._lock:
            if self.by_loop.get(driver.loop) is driver:
                del self.by_loop[driver.loop]
                self._closed_stats.add(driver.batcher.stats)
        if not driver.foreign:
            stop_isolating_task_modes(driver.loop)

    def watch(self, timeline: Timeline | None, device: str = "") -> None:
        """Tell `timeline` of every batch of this device from now on, or none."""
        with self._lock:
            self._timeline = None if timeline is None else (timeline, device)
            for driver in self.by_loop.values():
                self._watch(driver)

    def _watch(self, driver: LoopDriver) -> None:
        timeline, watch = self._timeline, None
        if timeline is not None:
            watch = BatchWatch(driver, self._streams, *timeline)
            for task, caller in list(driver._callers.items()):
                watch.name(caller, task)
        driver.watch = watch

    def set_settings(self, settings: Settings) -> None:
        """Put other limits in force: at once on a loop driver of this thread, on others with their next
        turn."""
        with self._lock:
            self._settings = settings
            if self._streams is not None:
                self._streams.completion = settings.completion
            drivers = list(self.by_loop.values())
        for driver in drivers:
            if driver.loop is asyncio._get_running_loop():
                self._apply_settings(driver)
                continue
            with suppress(RuntimeError):  # its loop is closed, so nothing runs there
                driver.loop.call_soon_threadsafe(self._apply_settings, driver)

    def _apply_settings(self, driver: LoopDriver) -> None:
        """On a loop driver's own thread: go by the settings of now; who waits for room gets what there is
        more."""
        settings, limits = self._settings, driver.batcher.limits
        limits.update(settings)
        if self._streams is not None:
            self.allow_inflight(driver, MAX_INFLIGHT_ON_HOST if self._streams.completion == HOST else 1)
        if not self._always_inline:
            driver.inline_limit_us = settings.inline_limit_us
            if driver.batcher.at_once is not None:
                driver.batcher.at_once.set_limits(settings.inline_limit_us, settings.max_inline_us)
        driver.inline.set_max(settings.max_inline_us)
        driver.batcher._admit()

    @staticmethod
    def allow_inflight(driver: LoopDriver, batches: int) -> None:
        """On a loop driver's own thread: have at most so many of its batches launched that have not ended."""
        driver.batcher.limits.max_inflight_batches = driver._max_inflight = batches

    def lose_reads(self, error: Exception | None) -> None:
        """Fail what is read back on every loop, and later reads until `lose_reads(None)`; from any thread."""
        with self._lock:
            drivers = list(self.by_loop.values())
        for driver in drivers:
            if driver.readback is not None:
                with suppress(RuntimeError):  # its loop is closed, so nothing reads there
                    driver.loop.call_soon_threadsafe(driver.readback.lose, error)

    def give_up(self, op: Any, error: Exception) -> None:
        """Fail the callers of batches of `op` that hang, on every loop; from any thread."""
        with self._lock:
            drivers = list(self.by_loop.values())
        for driver in drivers:
            with suppress(RuntimeError):  # its loop is closed, so no caller waits
                driver.loop.call_soon_threadsafe(driver._runs.give_up, op, error)

    def stats(self) -> BatcherStats:
        """What all loop drivers have counted, those of closed loops included."""
        with self._lock:
            total = BatcherStats()
            for stats in (self._closed_stats, *(driver.batcher.stats for driver in self.by_loop.values())):
                total.add(stats)
        return total

    async def drain(self, timeout_s: float) -> bool:
        """Drain the running loop's front, close the others; False if callers were cut off."""
        loop = asyncio._get_running_loop() or trio_run()
        driver = self.by_loop.get(loop)
        in_time = await driver.drain(timeout_s) if driver is not None else True
        self.close()
        return in_time

    def close(self) -> None:
        """Close every front, each on its own loop's thread."""
        with self._lock:
            self._closed = True
            drivers = list(self.by_loop.values())
        for driver in drivers:
            try:
                driver.loop.call_soon_threadsafe(_close_driver, driver)
            except RuntimeError:  # its loop is closed, so nothing runs there
                driver.close()

    def after_fork(self) -> None:
        """In a forked child: forget the parent's loops."""
        self._lock = threading.Lock()
        self.by_loop = {}
