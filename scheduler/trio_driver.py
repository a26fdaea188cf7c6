"""The driver of a trio run: what a `LoopDriver` uses of a loop, made of trio's own parts.

A turn is that of one system task: woken with the callers that a batch resumes, it lets one pass of trio's
scheduler go by, in which they submit, and runs what is due behind them. trio ends what it cancels at once:
a call whose caller was cancelled is taken back, as under asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextvars import Context
from functools import partial
from math import inf
from typing import Any

import trio
from trio.abc import Instrument
from trio.lowlevel import Abort, Task

from layerzero._util import log
from layerzero.scheduler.core.pending_call import RUNNING, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.task_modes import TASK_MODES

CALLBACK_FAILED = "loop_driver.callback_failed"


class TrioCaller:
    """A trio task as a driver knows one: it says when it has ended."""

    __slots__ = ("__weakref__", "_on_end", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._on_end: list[Callable[[Any], object]] = []

    def get_name(self) -> str:
        """What a timeline calls it."""
        return self.name

    def add_done_callback(self, on_end: Callable[[Any], object]) -> None:
        """Call `on_end(self)` when the task has ended."""
        self._on_end.append(on_end)

    def remove_done_callback(self, on_end: Callable[[Any], object]) -> None:
        """Do not."""
        self._on_end = [each for each in self._on_end if each != on_end]

    def ended(self) -> None:
        """The task has ended."""
        for on_end in self._on_end:
            on_end(self)


class TrioFuture:
    """A result to come, for one or more tasks of a run; nothing waits in it but trio's own tasks."""

    __slots__ = ("_error", "_event", "_value")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is there."""
        return self._event.is_set()

    def set_result(self, value: Any) -> None:
        """Give it."""
        self._value = value
        self._event.set()

    def set_exception(self, error: BaseException) -> None:
        """Give an error in its place."""
        self._error = error
        self._event.set()

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from self._event.wait().__await__()
        if self._error is not None:
            raise self._error
        return self._value


class TrioTimer:
    """A callback at a time of the run; `cancel` takes it back."""

    __slots__ = ("_scope",)

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self._scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._wait, due, callback, name="layerzero-timer")

    async def _wait(self, due: float, callback: Callable[[], object]) -> None:
        with self._scope:
            await trio.sleep_until(due)
            _run(callback)

    def cancel(self) -> None:
        """Do not call."""
        self._scope.cancel()


class TrioLoop(Instrument):
    """One trio run as a driver uses a loop; made and used inside it, but for `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False
        self._callers: dict[Task, TrioCaller] = {}
        self._due: deque[Callable[[], object]] = deque()
        self._parked: Task | None = None
        trio.lowlevel.add_instrument(self)
        trio.lowlevel.spawn_system_task(self._take_turns, name="layerzero-turns")

    # -- what trio tells ---------------------------------------------------------------------------

    def task_spawned(self, task: Task) -> None:
        """A task was made, which has not begun: torch's modes are its own from here on.

        The run's system tasks, ours among them, are children of its root, and stay as they are.
        """
        nursery = task.parent_nursery
        if nursery is not None and nursery.parent_task is not trio.lowlevel.current_root_task():
            task.coro = TASK_MODES.isolate(task.coro)

    def task_exited(self, task: Task) -> None:
        """A task of the run has ended."""
        caller = self._callers.pop(task, None)
        if caller is not None:
            caller.ended()

    def after_run(self) -> None:
        """The run has ended."""
        self._closed = True

    # -- what a driver uses ------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds of the run's clock."""
        return trio.current_time()

    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self._closed

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> None:
        """Run `callback(*args)` when every task that may run now has run."""
        due = partial(callback, *args)
        self._due.append(due if context is None else partial(context.run, due))
        if self._parked is not None:
            task, self._parked = self._parked, None
            trio.lowlevel.reschedule(task)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        """From any thread; raises RuntimeError after the end of the run."""
        self._token.run_sync_soon(partial(_run, partial(callback, *args)))

    def call_at(self, due: float, callback: Callable[[], object], *, context: Context) -> TrioTimer:
        """Run `callback()` at a time of the run's clock."""
        return TrioTimer(due, partial(context.run, callback))

    def create_future(self) -> TrioFuture:
        """A result to come."""
        return TrioFuture()

    def current_task(self, _: object = None) -> TrioCaller:
        """The running task."""
        task = trio.lowlevel.current_task()
        caller = self._callers.get(task)
        if caller is None:
            caller = self._callers[task] = TrioCaller(task.name)
        return caller

    async def _take_turns(self) -> None:
        while True:
            if not self._due:
                self._parked = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._leave)
            else:  # among the tasks that were woken with it, in no order
                await trio.lowlevel.cancel_shielded_checkpoint()
            await trio.lowlevel.cancel_shielded_checkpoint()  # behind all of those
            due, self._due = self._due, deque()
            for callback in due:
                _run(callback)

    def _leave(self, _: Callable[[], None]) -> Abort:
        self._parked = None
        return Abort.SUCCEEDED


def _run(callback: Callable[[], object]) -> None:
    """Run a callback; what it raises ends no system task, and with it the run."""
    try:
        callback()
    except Exception as error:
        log.error(CALLBACK_FAILED, error=repr(error))


class TrioDriver(LoopDriver):
    """The driver of one trio run; the same batcher, limits, deadlines and turns."""

    __slots__ = ()

    foreign = True

    async def waiting(self, call: PendingCall) -> Any:
        """The outcome of a submitted call, whose caller waits as trio's tasks do."""
        if call.state > RUNNING:
            await trio.lowlevel.checkpoint()
            return call.result()
        task = trio.lowlevel.current_task()
        call.add_done_callback(lambda _: trio.lowlevel.reschedule(task))

        def leave(_: Callable[[], None]) -> Abort:
            if call.wake is None:
                return Abort.FAILED  # its outcome is on the way
            call.wake = None
            call.cancel()
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        return call.result()

    async def yield_once(self) -> bool:  # type: ignore[override]
        """As `LoopDriver.yield_once`: a turn for a task that is alone, nothing for others."""
        task = self._current_task(self.loop)
        if self.sole_caller is not task:
            return False
        await trio.lowlevel.checkpoint()
        if self.sole_caller is not task:
            return False
        self.inline.used_us = 0.0
        return True

    async def _wait_drained(self, timeout_s: float) -> bool:
        with trio.move_on_after(timeout_s if timeout_s < inf else inf):
            await self._drained  # type: ignore[misc]
            return True
        return False


_LOOP: trio.lowlevel.RunVar[TrioLoop] = trio.lowlevel.RunVar("layerzero")


def current_loop() -> TrioLoop | None:
    """The loop of the running trio run, made at its first use; None where no run is here."""
    try:
        return _LOOP.get()
    except LookupError:
        loop = TrioLoop()
        _LOOP.set(loop)
        return loop
    except RuntimeError:
        return None
