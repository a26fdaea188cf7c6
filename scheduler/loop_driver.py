"""The driver, where a batcher meets asyncio: loop turns become batcher events, batches become results.

A loop driver serves one event loop. Its callers' tasks wait on pending calls; a batch's pending calls are
resumed in one callback, each in its task's context, so no caller costs the loop a handle of its own. While
those callers submit their next calls the loop driver has one turn scheduled behind them: that is the
batcher's "one turn".
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final

import torch

from layerzero._util import log
from layerzero.actors.device.worker import Worker
from layerzero.native import FAST_PATH
from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.bisect import Executor, bisect_failed_batch
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.limits import BatchLimits
from layerzero.scheduler.core.pending_call import RUNNING, Batch, Caller, Failed, PendingCall
from layerzero.scheduler.protocols import HostReader
from layerzero.scheduler.streams import HOST, CrossStreamModes, DeviceStreams
from layerzero.scheduler.torch_modes import Modes
from layerzero.scheduler.watching import BatchWatch
from layerzero.scheduler.yield_once import YieldOnce
from layerzero.spec.errors import DeadlineExceededError, OverloadedError, RuntimeClosedError
from layerzero.spec.settings import Settings

OPEN: Final = "running"
DRAINING: Final = "draining"
STOPPED: Final = "stopped"

LOOP_CLOSED = "loop_driver.loop_closed"
TURN_S = 5e-4  # what one turn of a loop that serves many callers may take
MAX_INFLIGHT_ON_HOST = 2  # batches that may be launched and not have run, where callers wait until theirs has

Task = asyncio.Future[Any]  # a task, or the result of a spawned coroutine
Cancelled = asyncio.CancelledError


class LoopDriver:
    """One event loop's side of a device: a batcher, the tasks that use it, at most one batch in flight.

    Every method belongs to the loop's thread. `always_inline` is for devices whose launches do not compute
    on the calling thread.
    """

    __slots__ = (
        "__weakref__", "_asked", "_callers", "_callers_changed", "_context", "_deadline_s",
        "_deadline_timer", "_drained", "_executor", "_hold_timer", "_inflight", "_inline_us",
        "_last_modes", "_lock", "_loop_closed_noted", "_max_inflight", "_max_inline_us", "_now_s",
        "_streams", "_tick_scheduled", "_worker", "_yielded", "ambient_grad", "ambient_stream", "batcher",
        "inline_limit_us", "loop", "readback", "sole_caller", "state", "stepping", "watch",
    )  # fmt: skip

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
        # What tasks find that begin while others wait: a waiting caller's own grad mode goes with it.
        self.ambient_grad = torch.is_grad_enabled()
        self.ambient_stream = None if streams is None else streams.default_stream()
        self._streams = streams
        self.batcher = Batcher(BatchLimits.from_settings(settings))
        self.state = OPEN
        # What copies results to the host for this loop, on a device that has its own memory.
        self.readback: HostReader | None = None if make_reader is None else make_reader(self)
        self.stepping: Caller | None = None  # the spawned coroutine that runs just now
        self.watch: BatchWatch | None = None  # of a timeline, where one runs
        self._executor = executor
        self._worker = worker
        if streams is not None:
            self.batcher.expected_callers = ExpectedCallers(self.batcher.limits)
            if streams.completion == HOST:
                self.batcher.limits.max_inflight_batches = MAX_INFLIGHT_ON_HOST
        self._last_modes: Modes | CrossStreamModes | None = None  # of the batch that was launched last
        self._asked = False  # whether the device is to say when it has run
        self._max_inflight = self.batcher.limits.max_inflight_batches
        self.inline_limit_us = float("inf") if always_inline else settings.inline_limit_us
        self._max_inline_us = settings.max_inline_us
        self._callers: dict[Task, Caller] = {}
        # The only task there is, if it may expect to stay that for this turn; None where callers meet.
        self.sole_caller: Task | None = None
        self._callers_changed = False
        self._inline_us = 0.0
        self._now_s = 0.0
        self._tick_scheduled = False
        self._yielded = False  # whether the last turn launched nothing, for readers
        # Batches run in a context of their own: they belong to no caller more than to the others.
        self._context = Context()
        self._inflight: list[Batch] = []
        self._lock = threading.Lock()  # for the end of a loop driver whose loop is closed: see _drop_batch
        self._loop_closed_noted = False
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_s = float("inf")
        self._hold_timer: asyncio.TimerHandle | None = None  # when what is held back goes at the latest
        self._drained: asyncio.Future[None] | None = None  # set when a draining driver's last caller has gone

    # -- callers -----------------------------------------------------------------------------------

    def submit(self, call: PendingCall) -> PendingCall:
        """Queue a call of the current task; await what comes back.

        Raises: OverloadedError: the queue is full and the settings reject; RuntimeClosedError: the driver
            is stopped, or drains and this task is new to it.
        """
        loop = self.loop
        caller = self.stepping
        if caller is None:
            task = asyncio.current_task(loop)
            caller = self._callers.get(task)  # type: ignore[arg-type]
            if caller is None:
                caller = self._add_task(task)
        call.caller = caller
        call.driver = self
        call._loop = loop
        batcher = self.batcher
        if not batcher.submit(call, self._now_s or loop.time()):
            self._raise_rejected()
        if call.deadline is not None:
            self._watch_deadline()
        if not self._tick_scheduled and batcher.inflight_batches < self._max_inflight:
            self._tick_scheduled = True
            loop.call_soon(self._tick, context=self._context)
        return call

    def may_inline(self) -> bool:
        """Whether the current task may run a call without suspending: it is alone, the loop had a turn."""
        return (
            self.sole_caller is not None
            and self._inline_us < self._max_inline_us
            and self.sole_caller is asyncio.current_task(self.loop)
        )

    def yield_once(self) -> YieldOnce:
        """Await it where `may_inline` is false: a loop turn for a task that is alone, nothing for others.

        The result says whether it may run inline now.
        """
        return YieldOnce(self)

    def add_inline_us(self, inline_us: float) -> None:
        """Count `inline_us` microseconds of work done inline since the loop's last turn here."""
        self._inline_us += inline_us

    def cancel(self, call: PendingCall, message: object = None) -> bool:
        """Take a call back: out of the queue at once, or detached from the batch it runs in."""
        if not self.batcher.cancel(call):
            return False
        # A batch that was left behind still writes what it was given: nobody runs inline beside it.
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
        caller = Caller()
        if self.watch is not None:
            self.watch.name(caller, task)
        if task is not None:
            self._callers[task] = caller
            task.add_done_callback(self._remove_task)
        self._on_callers_changed()
        return caller

    def _remove_task(self, task: Task) -> None:
        caller = self._callers.pop(task, None)
        if caller is not None and self.batcher.expected_callers is not None:
            self.batcher.expected_callers.forget(caller)
        self._on_callers_changed()
        if not self._callers and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _on_callers_changed(self) -> None:
        """Somebody came or went: nobody is alone before a whole turn has passed."""
        self.sole_caller = None
        self._callers_changed = True
        self._schedule_tick()

    def _raise_rejected(self) -> None:
        if self.state != OPEN:
            raise RuntimeClosedError(f"this event loop's driver is {self.state}")
        queued, size = self.batcher.queued, self.batcher.queued_bytes
        message = f"the queue is full: {queued} calls, {size} bytes are queued"
        raise OverloadedError(message, retry_after=self.batcher.retry_after_s)

    # -- turns -------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        if not self._tick_scheduled and self.state != STOPPED:
            self._tick_scheduled = True
            self.loop.call_soon(self._tick, context=self._context)

    def _tick(self) -> None:
        """A turn has passed: whoever was resumed has submitted."""
        self._tick_scheduled = False
        self._inline_us = 0.0
        if self.sole_caller is None and len(self._callers) == 1 and not self._inflight:
            if self._callers_changed:
                self._schedule_tick()
            else:
                self.sole_caller = next(iter(self._callers))
        self._callers_changed = False
        batcher = self.batcher
        now_s = self.loop.time()
        if self._yields_to_readers(now_s):
            self._schedule_tick()
            return
        batcher.on_turn(now_s)
        if self._deadline_s <= now_s:
            self._expire_calls(now_s)
        while (batch := batcher.next_batch(now_s)) is not None:
            self._launch(batch)
        if batcher.deferred_until < float("inf"):
            self._tick_at(batcher.deferred_until)
        if batcher.expected_callers is not None and batcher.expected_callers.needs_device and not self._asked:
            self._ask_device(batcher.expected_callers)

    def _yields_to_readers(self, now_s: float) -> bool:
        """Whether a turn more costs nothing: what is launched stands behind a batch that still runs.

        Tasks that were started with the calls that wait, to read results of that batch, come first: a copy
        that is launched after the next batch would be there only after it.
        """
        expected = self.batcher.expected_callers
        self._yielded = (
            not self._yielded
            and expected is not None
            and self.readback is not None
            and expected.busy_s(now_s) > TURN_S
        )
        return self._yielded

    def _ask_device(self, expected: ExpectedCallers) -> None:
        """Have the device say when it has run what was launched so far: a hold ends by it."""
        assert self._streams is not None and self._last_modes is not None
        self._asked = True
        try:
            self._streams.notify_when_done(self._last_modes, partial(self._device_ran, expected.launches))
        except RuntimeClosedError:  # nobody will say it: no hold waits for it, and the next one asks again
            self._on_completed(expected.launches)

    def _device_ran(self, launches: int, error: Exception | None) -> None:
        """On the event thread; an error of the device is for those that read its results."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._on_completed, launches)

    def _on_completed(self, launches: int) -> None:
        self._asked = False
        self.completed(launches)

    @property
    def launches(self) -> int:
        """Batches that were launched and whose end is told by `completed`; 0 where that is not counted."""
        return 0 if self.batcher.expected_callers is None else self.batcher.expected_callers.launches

    def completed(self, launches: int) -> None:
        """The device has run the first `launches` batches: what was held for that continues."""
        if self.batcher.expected_callers is not None:
            self.batcher.expected_callers.completed(launches, self.loop.time())
            if self.batcher.queued:
                self._schedule_tick()

    def _tick_at(self, until: float) -> None:
        """Have a turn at `until`, whoever is still away then."""
        if self._hold_timer is not None:
            if self._hold_timer.when() == until and not self._hold_timer.cancelled():
                return
            self._hold_timer.cancel()
        self._hold_timer = self.loop.call_at(until, self._on_hold_end, context=self._context)

    def _on_hold_end(self) -> None:
        self._hold_timer = None
        self._schedule_tick()

    def _launch(self, batch: Batch) -> None:
        if self.watch is not None:
            batch.record = self.watch.launched(batch)
        if self.readback is not None:
            self.readback.flush()
        if batch.expected_us < self.inline_limit_us:
            started = self.loop.time()
            try:
                outcomes = self._execute(batch)
            except BaseException as error:  # the interpreter is being stopped: strand nobody on the way out
                self._complete(batch, batch.interrupted(error))
                raise
            if self.batcher.expected_callers is not None:
                self.batcher.expected_callers.launch_took(self.loop.time() - started)
            if self._streams is None or self._streams.completion != HOST:
                self._complete(batch, outcomes)
            else:
                self._inflight.append(batch)
                self._notify_when_done(batch, outcomes)
            return
        self._inflight.append(batch)
        try:
            self._worker.submit(partial(self._execute_on_worker, batch))
        except RuntimeClosedError as error:
            self._inflight.remove(batch)
            self._complete(batch, [Failed(error)] * len(batch))

    def _execute(self, batch: Batch) -> list[Any]:
        op, modes, snapshot, execute = batch.op, batch.modes, batch.snapshot, self._executor.execute
        if self._streams is not None:
            modes = batch.modes = self._last_modes = self._streams.modes_of(batch.calls)
        if batch.record is not None:
            execute = batch.record.around(execute)
        return bisect_failed_batch(
            lambda calls: execute(op, calls, modes, snapshot), batch.args_list, pure=op.pure
        )

    def _execute_on_worker(self, batch: Batch) -> None:
        """On the worker's thread."""
        try:
            outcomes = self._execute(batch)
        except BaseException as error:
            outcomes = batch.interrupted(error)
        self._hand_to_loop(batch, outcomes)

    def _notify_when_done(self, batch: Batch, outcomes: list[Any]) -> None:
        """Answer a launched batch's callers when it has run."""
        assert self._streams is not None
        try:
            self._streams.notify_when_done(batch.modes, partial(self._on_event_done, batch, outcomes))
        except RuntimeClosedError as error:
            self._on_batch_done(batch, [Failed(error)] * len(batch))

    def _on_event_done(self, batch: Batch, outcomes: list[Any], error: Exception | None) -> None:
        """On the event thread: a launched batch has run, or its device has failed."""
        if error is not None:
            outcomes = [Failed(error)] * len(batch)
        self._hand_to_loop(batch, outcomes)

    def _hand_to_loop(self, batch: Batch, outcomes: list[Any]) -> None:
        """From another thread: complete a batch in the loop's next turn, in one wake for all its callers."""
        try:
            self.loop.call_soon_threadsafe(self._on_batch_done, batch, outcomes)
        except RuntimeError:
            self.note_loop_closed(len(batch))
            self._drop_batch(batch)

    def note_loop_closed(self, calls: int) -> None:
        """From another thread: results came behind the loop's end, as `asyncio.run` may end; logged once."""
        with self._lock:
            noted, self._loop_closed_noted = self._loop_closed_noted, True
        if not noted:
            log.debug(LOOP_CLOSED, calls=calls)

    def _drop_batch(self, batch: Batch) -> None:
        """The loop was closed under a batch: only the counts are brought to an end.

        The worker that finds the loop closed calls it, or `close`; nothing else uses the batcher then.
        """
        with self._lock:
            if batch not in self._inflight:
                return
            self._inflight.remove(batch)
            batcher = self.batcher
            for call in batch.calls:
                batcher.cancel(call)
            batcher.on_batch_done(batch, [None] * len(batch), batch.started)

    def _on_batch_done(self, batch: Batch, outcomes: list[Any]) -> None:
        self._inflight.remove(batch)
        if batch.launch is not None and self.batcher.expected_callers is not None:
            self.batcher.expected_callers.completed(batch.launch.number, self.loop.time())
        self._complete(batch, outcomes, from_worker=True)

    def _complete(self, batch: Batch, outcomes: list[Any], *, from_worker: bool = False) -> None:
        now_s = self.loop.time()
        self.batcher.on_batch_done(batch, outcomes, now_s)
        if batch.record is not None:
            batch.record.ended(outcomes, now_s)
        all_called = False
        # None of the resumed arms the turn: that is done below.
        armed, self._tick_scheduled = self._tick_scheduled, True
        self._now_s = now_s  # what they submit at once comes at one time
        try:
            self._wake(iter(batch.calls))
            all_called = from_worker and 0 < len(self._callers) <= self.batcher.queued
        finally:
            self._now_s = 0.0
            self._tick_scheduled = armed
            if not all_called:
                self._schedule_tick()
        if all_called:  # every caller has called: a turn would be waited for in vain
            self._tick()

    def _wake(self, calls: Iterator[PendingCall]) -> None:
        """Resume the callers of `tickets`; what they submit next is queued when this returns."""
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
        """Send the callers of pending calls on that have ended elsewhere; what they submit comes at one
        time."""
        self._now_s = self.loop.time()
        try:
            self._wake(iter(calls))
        finally:
            self._now_s = 0.0

    def fail(self, call: PendingCall, error: BaseException) -> None:
        """Give a pending call an error outside of any batch."""
        call.value = Failed(error)
        if self.watch is not None and call.caller is not None:
            self.watch.left(call, error)
        wake = call.wake
        if wake is not None:
            call.wake = None
            self.loop.call_soon(wake, call, context=call.context)

    # -- deadlines ---------------------------------------------------------------------------------

    def _watch_deadline(self) -> None:
        """Keep one timer, for the nearest deadline of a call that has not started."""
        deadline_s = self.batcher.next_deadline
        if deadline_s >= self._deadline_s:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_s = deadline_s
        self._deadline_timer = self.loop.call_at(deadline_s, self._on_deadline)

    def _on_deadline(self) -> None:
        # A loop's timer may fire up to one clock tick early.
        self._expire_calls(max(self.loop.time(), self._deadline_s))

    def _expire_calls(self, now_s: float) -> None:
        for call in self.batcher.expire(now_s):
            waited_ms = (now_s - call.submitted_at) * 1e3
            self.fail(call, DeadlineExceededError(f"not started after {waited_ms:.1f} ms in the queue"))
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer, self._deadline_s = None, float("inf")
        if self.batcher.next_deadline < self._deadline_s:
            self._watch_deadline()

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new callers, let the known ones end, then close; False if `timeout_s` cut them off.

        The task that drains is not waited for. Callers that have not ended by then get RuntimeClosedError.
        """
        if self.state == STOPPED:
            return True
        self.state = DRAINING
        task = asyncio.current_task(self.loop)
        if task is not None and self._callers.pop(task, None) is not None:
            task.remove_done_callback(self._remove_task)
        in_time = True
        if self._callers:
            self._drained = self.loop.create_future()
            await asyncio.wait({self._drained}, timeout=timeout_s)
            in_time = self._drained.done()
        self.close()
        return in_time

    def close(self) -> None:
        """Stop at once: what queues or runs fails with RuntimeClosedError, a running batch is detached."""
        if self.state == STOPPED:
            return
        self.state = STOPPED
        batcher = self.batcher
        unfinished = batcher.abandon()
        loop_closed = self.loop.is_closed()
        for batch in list(self._inflight):
            unfinished += [t for t in batch.calls if t.state == RUNNING and batcher.cancel(t)]
            if loop_closed:
                self._drop_batch(batch)
        for call in unfinished:
            if loop_closed:
                call.wake = None
            self.fail(call, RuntimeClosedError("the runtime was closed before this call ended"))
        for timer in (self._deadline_timer, self._hold_timer):
            if timer is not None:
                timer.cancel()
        self._deadline_timer = self._hold_timer = None
        for task in self._callers:
            if not loop_closed:
                task.remove_done_callback(self._remove_task)
        self._callers.clear()
        self.sole_caller = None
