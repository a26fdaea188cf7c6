"""The driver, where a batcher meets asyncio: loop turns become batcher events, batches become results.

A loop driver serves one event loop. Its callers' tasks wait on pending calls; a batch's pending calls are
resumed in one callback, each in its task's context, so no caller costs the loop a handle of its own. While
those callers submit their next calls the loop driver has one turn scheduled behind them: that is the
batcher's "one turn".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from typing import Any, Final

import torch

from layerzero.actors.device.worker import Worker
from layerzero.native import FAST_PATH
from layerzero.scheduler.batch_runs import STOPPED, BatchRuns
from layerzero.scheduler.core.at_once import ImmediateGroups
from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.bisect import Executor
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.limits import BatchLimits
from layerzero.scheduler.core.pending_call import Batch, Caller, Failure, PendingCall, TaskTree
from layerzero.scheduler.driver_timers import CallDeadlines, DueTimer
from layerzero.scheduler.inline_runs import InlineRuns, YieldAwaitable
from layerzero.scheduler.modes.streams import HOST, DeviceStreams, HostReader
from layerzero.scheduler.watching import BatchWatch
from layerzero.spec.errors import OverloadedError, RuntimeClosedError
from layerzero.spec.settings import Settings

OPEN: Final = "running"
DRAINING: Final = "draining"
MAX_INFLIGHT_ON_HOST = 2  # batches that may be launched and not have run, where callers wait until theirs has
MAX_FOLLOWING = 8  # batches that follow one another without a turn of the loop

Task = asyncio.Future[Any]  # a task, or the result of a spawned coroutine
Cancelled = asyncio.CancelledError


class LoopDriver:
    """One event loop's side of a device: a batcher, the tasks that use it, at most one batch in flight.

    Every method belongs to the loop's thread. `always_inline`: the device's launches do not compute on it.
    """

    __slots__ = (
        "__weakref__", "_callers", "_callers_changed", "_completed_at_s", "_context", "_current_task",
        "_deadlines", "_drained", "_followed", "_hold_end", "_in_tick", "_max_inflight", "_now_s", "_runs",
        "_tick_scheduled", "_ticked_at_s", "_turn", "ambient_grad", "ambient_stream", "at_once", "batcher",
        "inline", "inline_limit_us", "loop", "on_interrupted", "readback", "sole_caller", "state", "stepping",
        "watch",
    )  # fmt: skip

    foreign = False  # whether its loop is another library's, whose tasks wait through `waiting`

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        worker: Worker,
        settings: Settings | None = None,
        *,
        always_inline: bool = False,
        streams: DeviceStreams | None = None,
        make_reader: Callable[[LoopDriver], HostReader] | None = None,
    ) -> None:
        settings = settings or Settings()
        self.loop = loop
        self._current_task: Callable[[Any], Any] = getattr(loop, "current_task", asyncio.current_task)
        # What tasks find that begin while others wait: a waiting caller's own grad mode goes with it.
        self.ambient_grad = torch.is_grad_enabled()
        self.ambient_stream = None if streams is None else streams.default_stream()
        self.batcher = Batcher(BatchLimits.from_settings(settings))
        self.state = OPEN
        # What copies results to the host for this loop, on a device that has its own memory.
        self.readback: HostReader | None = None if make_reader is None else make_reader(self)
        self.stepping: Caller | None = None  # the spawned coroutine that runs just now
        self.watch: BatchWatch | None = None  # of a timeline, where one runs
        self.on_interrupted: Callable[[LoopDriver], None] | None = None  # see `BatchRuns.interrupted`
        self._runs = BatchRuns(self, executor, worker, streams)
        self._turn = self._runs.whole(self._tick)
        if streams is not None:
            self.batcher.expected_callers = ExpectedCallers(self.batcher.limits)
            if streams.completion == HOST:
                self.batcher.limits.max_inflight_batches = MAX_INFLIGHT_ON_HOST
        self._max_inflight = self.batcher.limits.max_inflight_batches
        if streams is None and not always_inline:
            self.batcher.at_once = ImmediateGroups(settings.inline_limit_us, settings.max_inline_us)
        self.inline = InlineRuns(self, settings.max_inline_us, self._runs.inflight)
        self.at_once = self.inline.groups  # for those that ask at each call
        self._in_tick = False
        self._followed = 0
        self._ticked_at_s = self._completed_at_s = 0.0
        self.inline_limit_us = float("inf") if always_inline else settings.inline_limit_us
        self._callers: dict[Task, Caller] = {}
        # The only task there is, if it may expect to stay that for this turn; None where callers meet.
        self.sole_caller: Task | None = None
        self._callers_changed = False
        self._now_s = 0.0
        self._tick_scheduled = False
        self._context = Context()  # batches belong to no caller more than to the others
        self._deadlines = CallDeadlines(self, self._context)
        self._hold_end = DueTimer(loop, self._runs.whole(self._on_hold_end), self._context)
        self._drained: asyncio.Future[None] | None = None  # set when a draining driver's last caller has gone

    # -- callers -----------------------------------------------------------------------------------

    def submit(self, call: PendingCall) -> PendingCall:
        """Queue a call of the current task; await what comes back.

        Raises: OverloadedError: the queue is full and the settings reject; RuntimeClosedError: the driver
            is stopped, or drains and this task is new to it.
        """
        call.caller = self.caller_here()
        call.driver = self
        call._loop = loop = self.loop
        batcher = self.batcher
        if not self._runs.submit(call, self._now_s or loop.time()):
            self._raise_rejected()
        if call.deadline is not None:
            self._deadlines.watch()
        if not self._tick_scheduled and batcher.inflight_batches < self._max_inflight:
            loop.call_soon(self._turn, context=self._context)
            self._tick_scheduled = True  # behind it: a signal handler may raise between the two
        return call

    def caller_here(self) -> Caller:
        """Who runs now: the spawned coroutine that is stepped, or the current task.

        Raises: RuntimeClosedError: the driver is stopped, or drains and this task is new to it.
        """
        if self.stepping is not None:
            return self.stepping
        task = self._current_task(self.loop)
        caller = self._callers.get(task)
        return self._add_task(task) if caller is None else caller

    def may_inline(self) -> bool:
        """Whether the current task may run a call without suspending: it is alone, the loop had a turn."""
        return (
            self.sole_caller is not None
            and self.inline.used_us < self.inline.max_us
            and self.sole_caller is self._current_task(self.loop)
        )

    def yield_once(self) -> YieldAwaitable:
        """Await it where `may_inline` is false: a loop turn for a task that is alone, nothing for others.

        The result says whether it may run inline now.
        """
        return YieldAwaitable(self)

    async def waiting(self, call: PendingCall) -> Any:
        """The outcome of a submitted call, for a caller of another path than the short one."""
        return await call

    def add_inline_us(self, inline_us: float) -> None:
        """Count microseconds of work done inline since the loop's last turn here."""
        self.inline.used_us += inline_us

    def cancel(self, call: PendingCall, message: object = None) -> bool:
        """Take a call back: out of the queue at once, or detached from the batch it runs in."""
        if not self.batcher.cancel(call):
            return False
        # A batch that was left behind still writes what it was given: no call runs inline beside it.
        self.sole_caller = None
        error = asyncio.CancelledError() if message is None else asyncio.CancelledError(message)
        self.fail(call, error)
        return True

    def add_caller(self, ended: Task) -> Caller:
        """Know a caller that is no task until `ended` is done."""
        return self._add_task(ended)

    @property
    def callers(self) -> int:
        """Tasks that have used the loop driver and have not ended."""
        return len(self._callers)

    def _add_task(self, task: Task | None) -> Caller:
        if self.state != OPEN:
            raise RuntimeClosedError(f"this event loop's driver is {self.state} and takes no new callers")
        tree = None if self.batcher.expected_callers is None else TaskTree.begin(task)
        caller = Caller(tree)
        if task is not None:
            self._callers[task] = caller
            task.add_done_callback(self._remove_task)
            if self.batcher.at_once is not None:
                self.batcher.at_once.live.add(caller.number)
        if self.watch is not None:
            self.watch.name(caller, task)
        self._on_callers_changed()
        return caller

    def _remove_task(self, task: Task) -> None:
        caller = self._callers.pop(task, None)
        if caller is not None:
            expected = self.batcher.expected_callers
            if expected is not None:
                (expected.forget if task.cancelled() else expected.ended)(caller)
            if self.batcher.at_once is not None:
                self.batcher.at_once.live.discard(caller.number)
        self._on_callers_changed()
        if not self._callers and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _on_callers_changed(self) -> None:
        """A caller came or went: none is alone before a whole turn has passed."""
        self.sole_caller = None
        self._callers_changed = True
        self.schedule_tick()

    def note_loop_closed(self, calls: int) -> None:
        """From another thread: results came after the loop's end, as `asyncio.run` may end; logged once."""
        self._runs.note_loop_closed(calls)

    def _raise_rejected(self) -> None:
        if self.state != OPEN:
            raise RuntimeClosedError(f"this event loop's driver is {self.state}")
        batcher = self.batcher
        message = f"the queue is full: {batcher.queued} calls, {batcher.queued_bytes} bytes are queued"
        raise OverloadedError(message, retry_after=batcher.retry_after_s)

    # -- turns -------------------------------------------------------------------------------------

    def schedule_tick(self) -> None:
        """Have a turn of the loop pass, and what follows from it done."""
        if not self._tick_scheduled and self.state != STOPPED:
            self.loop.call_soon(self._turn, context=self._context)
            self._tick_scheduled = True

    def _tick(self) -> None:
        """A turn has passed: what was resumed has submitted."""
        self._tick_scheduled = False
        if self.inline.on_turn():
            return
        if self.sole_caller is None and len(self._callers) == 1 and not self._runs.inflight:
            if self._callers_changed:
                self.schedule_tick()
            else:
                self.sole_caller = next(iter(self._callers))
        self._callers_changed = False
        batcher = self.batcher
        now_s = self.loop.time()
        if self._runs.yields(now_s):
            self.schedule_tick()
            return
        batcher.on_turn(now_s)
        self._deadlines.on_turn(now_s)
        self._ticked_at_s, self._followed = now_s, 0
        self._in_tick = True
        try:
            while (batch := batcher.next_batch(now_s)) is not None:
                self._runs.launch(batch)
                now_s = max(now_s, self._completed_at_s)
        finally:
            self._in_tick = False
            self.inline.on_batches()
        if batcher.deferred_until < float("inf"):
            self._hold_end.set(batcher.deferred_until)
        if batcher.expected_callers is not None and batcher.expected_callers.needs_device:
            self._runs.ask_device(batcher.expected_callers)

    @property
    def launches(self) -> int:
        """Launched batches whose end `completed` reports; 0 where that is not counted."""
        return 0 if self.batcher.expected_callers is None else self.batcher.expected_callers.launches

    def completed(self, launches: int, *, ticks: bool = True) -> None:
        """The device has run the first `launches` batches: what was held for that continues."""
        if self.batcher.expected_callers is not None:
            self.batcher.expected_callers.completed(launches, self.loop.time())
            if ticks and self.batcher.queued:
                self.schedule_tick()

    def _on_hold_end(self) -> None:
        self._hold_end.cancel()
        self.schedule_tick()

    def complete(self, batch: Batch, outcomes: list[Any]) -> None:
        """A batch has ended: its callers continue."""
        batcher = self.batcher
        now_s = self._completed_at_s = self.loop.time()
        batcher.on_batch_done(batch, outcomes, now_s)
        if batch.record is not None:
            batch.record.ended(outcomes, now_s)
        queued, submitted, all_called = batcher.queued, batcher.stats.submitted, False
        # None of the resumed arms the turn: that is done below.
        armed, self._tick_scheduled = self._tick_scheduled, True
        self._now_s = now_s  # what they submit at once comes at one time
        try:
            self._wake(iter(batch.calls))
            self.inline.on_batches()
            all_called = batcher.queued - queued == len(batch)
            if not all_called:
                self._runs.resumed(batch, submitted)
        finally:
            self._now_s = 0.0
            self._tick_scheduled = armed
            if not all_called or (self._in_tick and not self._may_follow(now_s)):
                self.schedule_tick()
                all_called = False
        if all_called and self._in_tick:
            batcher.on_turn(now_s)
        elif all_called:
            self._tick()

    def _may_follow(self, now_s: float) -> bool:
        """Whether another batch runs here before the loop's next turn: all that were resumed have called."""
        self._followed += 1
        return (
            self._runs.streams is None
            and len(self._callers) > 1
            and self._followed < MAX_FOLLOWING
            and (now_s - self._ticked_at_s) * 1e6 < self.inline.max_us
        )

    def _wake(self, calls: Iterator[PendingCall]) -> None:
        """Resume the callers of `calls`; what they submit next is queued when this returns."""
        native = FAST_PATH.module
        try:
            if native is not None:
                native.resume(calls)
            for call in calls:
                wake = call.wake
                if wake is not None:
                    call.wake = None
                    call.context.run(wake, call)
        except BaseException:
            # A task lets only SystemExit and KeyboardInterrupt through; the others still get their results.
            self.loop.call_soon(self._wake, calls)
            raise

    def resume(self, calls: Sequence[PendingCall]) -> None:
        """Send callers on whose pending calls have ended elsewhere; what they submit comes at one time."""
        self._now_s = self.loop.time()
        try:
            self._wake(iter(calls))
        finally:
            self._now_s = 0.0

    def fail(self, call: PendingCall, error: BaseException) -> None:
        """Give a pending call an error outside of any batch."""
        call.value = Failure(error)
        if self.watch is not None and call.caller is not None:
            self.watch.left(call, error)
        wake = call.wake
        if wake is not None:
            call.wake = None
            self.loop.call_soon(wake, call, context=call.context)

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new callers, let the known ones end, then close; False if `timeout_s` cut them off.

        The task that drains is not waited for. Callers that have not ended by then get RuntimeClosedError.
        """
        if self.state == STOPPED:
            return True
        self.state = DRAINING
        task = self._current_task(self.loop)
        if task is not None and self._callers.pop(task, None) is not None:
            task.remove_done_callback(self._remove_task)
        in_time = True
        if self._callers:
            self._drained = self.loop.create_future()
            in_time = await self._wait_drained(timeout_s)
        self.close()
        return in_time

    async def _wait_drained(self, timeout_s: float) -> bool:
        return bool((await asyncio.wait({self._drained}, timeout=timeout_s))[0])  # type: ignore[type-var]

    def close(self) -> None:
        """Stop at once: what queues or runs fails with RuntimeClosedError, a running batch is detached."""
        if self.state == STOPPED:
            return
        self.state = STOPPED
        batcher = self.batcher
        unfinished = batcher.abandon()
        loop_closed = self.loop.is_closed()
        unfinished += self._runs.abandon(loop_closed=loop_closed)
        for call in unfinished:
            if loop_closed:
                call.wake = None
            self.fail(call, RuntimeClosedError("the runtime was closed before this call ended"))
        self._deadlines.cancel()
        self._hold_end.cancel()
        error = RuntimeClosedError("the runtime was closed before this call ended")
        self.inline.close(None if loop_closed else error)
        for task in self._callers:
            if not loop_closed:
                task.remove_done_callback(self._remove_task)
        self._callers.clear()
        self.sole_caller = None
