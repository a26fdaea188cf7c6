"""The driver, where a lane meets asyncio: loop turns become lane events, batches become results.

A front serves one event loop. Its callers' tasks wait on tickets; a batch's tickets are resumed in one
callback, each in its task's context, so no caller costs the loop a handle of its own. While those callers
submit their next calls the front has one turn scheduled behind them: that is the lane's "one turn".
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final

import torch

from layerzero._util import log
from layerzero.actors.device.worker import Worker
from layerzero.native import HOT
from layerzero.scheduler.core.batcher import Lane
from layerzero.scheduler.core.bisect import Executor, run_blaming
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.limits import Caps, Stats
from layerzero.scheduler.core.pending_call import RUNNING, Batch, Caller, Failed, Ticket
from layerzero.scheduler.core.round_robin import Group, Slot, Sweep
from layerzero.scheduler.streams import HOST, Across, Streams
from layerzero.scheduler.torch_modes import Modes
from layerzero.spec.errors import DeadlineExceededError, OverloadedError, RuntimeClosedError
from layerzero.spec.settings import Settings

OPEN: Final = "running"
DRAINING: Final = "draining"
STOPPED: Final = "stopped"

LOOP_LOST = "front.loop_lost"
RUN_AHEAD = 2  # batches that may be launched and not have run, where callers wait until theirs has

Task = asyncio.Future[Any]  # a task, or the result of a spawned coroutine
Cancelled = asyncio.CancelledError


class Front:
    """One event loop's side of a device: a lane, the tasks that use it, at most one batch in flight.

    Every method belongs to the loop's thread. `always_inline` is for devices whose launches do not compute
    on the calling thread.
    """

    __slots__ = (
        "__weakref__",
        "_across",
        "_ahead",
        "_armed",
        "_asked",
        "_callers",
        "_context",
        "_executor",
        "_flying",
        "_gone",
        "_hold",
        "_joined",
        "_last_modes",
        "_lock",
        "_max_inline_us",
        "_now",
        "_spent_us",
        "_timer",
        "_timer_at",
        "_worker",
        "alone",
        "ambient_grad",
        "ambient_stream",
        "inline_limit_us",
        "lane",
        "loop",
        "readback",
        "state",
        "stepping",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        worker: Worker,
        settings: Settings | None = None,
        *,
        always_inline: bool = False,
        across: Streams | None = None,
    ) -> None:
        settings = settings or Settings()
        self.loop = loop
        # What tasks find that begin while others wait: a waiting caller's own grad mode goes with it.
        self.ambient_grad = torch.is_grad_enabled()
        self.ambient_stream = None if across is None else across.ambient()
        self._across = across
        self.lane = Lane(Caps.of(settings))
        self.state = OPEN
        self.readback: Any = None  # what copies results to the host for this loop, where somebody asked
        self.stepping: Caller | None = None  # the spawned coroutine that runs just now
        self._executor = executor
        self._worker = worker
        if across is not None:
            self.lane.expected = ExpectedCallers(self.lane.caps)
            if across.completion == HOST:
                self.lane.caps.ahead = RUN_AHEAD
        self._last_modes: tuple[Modes | Across, Any] | None = None  # of the batch that was launched last
        self._asked = False  # whether the device is to say when it has run
        self._ahead = self.lane.caps.ahead
        self.inline_limit_us = float("inf") if always_inline else settings.inline_limit_us
        self._max_inline_us = settings.max_inline_us
        self._callers: dict[Task, Caller] = {}
        # The only task there is, if it may expect to stay that for this turn; None where callers meet.
        self.alone: Task | None = None
        self._joined = False
        self._spent_us = 0.0
        self._now = 0.0
        self._armed = False
        # Batches run in a context of their own: they belong to no caller more than to the others.
        self._context = Context()
        self._flying: list[Batch] = []
        self._lock = threading.Lock()  # for the end of a front whose loop is closed: see _lost
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._hold: asyncio.TimerHandle | None = None  # when what is held back goes at the latest
        self._gone: asyncio.Future[None] | None = None  # set when a draining front has lost its last caller

    # -- callers -----------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue a call of the current task; await what comes back.

        Raises: OverloadedError: the queue is full and the settings reject; RuntimeClosedError: the front is
            stopped, or drains and this task is new to it.
        """
        loop = self.loop
        caller = self.stepping
        if caller is None:
            task = asyncio.current_task(loop)
            caller = self._callers.get(task)  # type: ignore[arg-type]
            if caller is None:
                caller = self._register(task)
        ticket.caller = caller
        ticket.front = self
        ticket._loop = loop
        lane = self.lane
        if not lane.submit(ticket, self._now or loop.time()):
            self._refuse()
        if ticket.deadline is not None:
            self._watch()
        if not self._armed and lane.in_flight < self._ahead:
            self._armed = True
            loop.call_soon(self._tick, context=self._context)
        return ticket

    def may_inline(self) -> bool:
        """Whether the current task may run a call at once without suspending: it is alone, and the loop has
        had a turn recently."""
        return (
            self.alone is not None
            and self._spent_us < self._max_inline_us
            and self.alone is asyncio.current_task(self.loop)
        )

    def rested(self) -> Rest:
        """Await it where `may_inline` is false: one loop turn for a task that is alone but has had its share,
        nothing for any other; the result says whether it may run inline now."""
        return Rest(self)

    def charge(self, us: float) -> None:
        """Count `us` microseconds of work done inline since the loop's last turn here."""
        self._spent_us += us

    def cancel(self, ticket: Ticket, message: object = None) -> bool:
        """Take a call back: out of the queue at once, or detached from the batch it runs in."""
        if not self.lane.cancel(ticket):
            return False
        # A batch that was left behind still writes what it was given: nobody runs inline beside it.
        self.alone = None
        error = asyncio.CancelledError() if message is None else asyncio.CancelledError(message)
        self.end(ticket, error)
        return True

    def enlist(self, ended: Task) -> Caller:
        """Know a caller that is no task until `ended` is done."""
        return self._register(ended)

    @property
    def callers(self) -> int:
        """Tasks that have used the front and have not ended."""
        return len(self._callers)

    def _register(self, task: Task | None) -> Caller:
        if self.state != OPEN:
            raise RuntimeClosedError(f"this event loop's front is {self.state} and takes no new callers")
        caller = Caller()
        if task is not None:
            self._callers[task] = caller
            task.add_done_callback(self._unregister)
        self._changed()
        return caller

    def _unregister(self, task: Task) -> None:
        caller = self._callers.pop(task, None)
        if caller is not None and self.lane.expected is not None:
            self.lane.expected.forget(caller)
        self._changed()
        if not self._callers and self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _changed(self) -> None:
        """Somebody came or went: nobody is alone before a whole turn has passed."""
        self.alone = None
        self._joined = True
        self._arm()

    def _refuse(self) -> None:
        if self.state != OPEN:
            raise RuntimeClosedError(f"this event loop's front is {self.state}")
        lane = self.lane
        raise OverloadedError(
            f"the lane is full: {lane.queued} calls, {lane.queued_bytes} bytes are queued",
            retry_after=lane.retry_after_s,
        )

    # -- turns -------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if not self._armed and self.state != STOPPED:
            self._armed = True
            self.loop.call_soon(self._tick, context=self._context)

    def _tick(self) -> None:
        """A turn has passed: whoever was resumed has submitted."""
        self._armed = False
        self._spent_us = 0.0
        if self.alone is None and len(self._callers) == 1 and not self._flying:
            if self._joined:
                self._arm()
            else:
                self.alone = next(iter(self._callers))
        self._joined = False
        lane = self.lane
        now = self.loop.time()
        lane.turn(now)
        if self._timer_at <= now:
            self._expire(now)
        while (batch := lane.next_batch(now)) is not None:
            self._launch(batch)
        if lane.held_until < float("inf"):
            self._wait_at_most(lane.held_until)
        if lane.expected is not None and lane.expected.needs_device and not self._asked:
            self._ask_device(lane.expected)

    def _ask_device(self, expected: ExpectedCallers) -> None:
        """Have the device say when it has run what was launched so far: a hold ends by it."""
        assert self._across is not None and self._last_modes is not None
        self._asked = True
        try:
            self._across.reap(self._last_modes, partial(self._device_ran, expected.launches))
        except RuntimeClosedError:
            expected.completed(expected.launches, self.loop.time())

    def _device_ran(self, launches: int, error: Exception | None) -> None:
        """On the reaper's thread; an error of the device is for those that read its results."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._completed, launches)

    def _completed(self, launches: int) -> None:
        self._asked = False
        self.completed(launches)

    @property
    def launches(self) -> int:
        """Batches that were launched and whose end is told by `completed`; 0 where that is not counted."""
        return 0 if self.lane.expected is None else self.lane.expected.launches

    def completed(self, launches: int) -> None:
        """The device has run the first `launches` batches: what was held for that goes on."""
        if self.lane.expected is not None:
            self.lane.expected.completed(launches, self.loop.time())
            if self.lane.queued:
                self._arm()

    def _wait_at_most(self, until: float) -> None:
        """Have a turn at `until`, whoever is still away then."""
        if self._hold is not None:
            if self._hold.when() == until and not self._hold.cancelled():
                return
            self._hold.cancel()
        self._hold = self.loop.call_at(until, self._held_long, context=self._context)

    def _held_long(self) -> None:
        self._hold = None
        self._arm()

    def _launch(self, batch: Batch) -> None:
        if batch.expected_us < self.inline_limit_us:
            try:
                outcomes = self._run(batch)
            except BaseException as error:  # the interpreter is being stopped: strand nobody on the way out
                self._finish(batch, batch.interrupted(error))
                raise
            if self._across is not None and self._across.completion == HOST:
                self._flying.append(batch)
                self._reap(batch, outcomes)
                return
            self._finish(batch, outcomes)
            return
        self._flying.append(batch)
        try:
            self._worker.submit(partial(self._run_there, batch))
        except RuntimeClosedError as error:
            self._flying.remove(batch)
            self._finish(batch, [Failed(error)] * len(batch))

    def _run(self, batch: Batch) -> list[Any]:
        op, modes, execute = batch.op, batch.modes, self._executor.execute
        if self._across is not None:
            modes = batch.modes = self._last_modes = self._across.of(batch.tickets)
        return run_blaming(lambda calls: execute(op, calls, modes), batch.calls, pure=op.pure)

    def _run_there(self, batch: Batch) -> None:
        """On the worker's thread: run the batch, wake the loop once."""
        try:
            outcomes = self._run(batch)
        except BaseException as error:
            outcomes = batch.interrupted(error)
        try:
            self.loop.call_soon_threadsafe(self._landed, batch, outcomes)
        except RuntimeError:
            log.warning(LOOP_LOST, calls=len(batch))
            self._lost(batch)

    def _reap(self, batch: Batch, outcomes: list[Any]) -> None:
        """Answer a launched batch's callers when it has run."""
        assert self._across is not None
        try:
            self._across.reap(batch.modes, partial(self._reaped, batch, outcomes))
        except RuntimeClosedError as error:
            self._landed(batch, [Failed(error)] * len(batch))

    def _reaped(self, batch: Batch, outcomes: list[Any], error: Exception | None) -> None:
        """On the reaper's thread: a launched batch has run, or its device has failed."""
        if error is not None:
            outcomes = [Failed(error)] * len(batch)
        try:
            self.loop.call_soon_threadsafe(self._landed, batch, outcomes)
        except RuntimeError:
            log.warning(LOOP_LOST, calls=len(batch))
            self._lost(batch)

    def _lost(self, batch: Batch) -> None:
        """The loop was closed under a batch: nobody waits any more, only the counts are brought to an end.

        Called by the worker that finds the loop closed and by `close`, whichever comes first; nothing else
        uses the lane then.
        """
        with self._lock:
            if batch not in self._flying:
                return
            self._flying.remove(batch)
            lane = self.lane
            for ticket in batch.tickets:
                lane.cancel(ticket)
            lane.done(batch, [None] * len(batch), batch.started)

    def _landed(self, batch: Batch, outcomes: list[Any]) -> None:
        self._flying.remove(batch)
        if batch.launch is not None and self.lane.expected is not None:
            self.lane.expected.completed(batch.launch.number, self.loop.time())
        self._finish(batch, outcomes, landed=True)

    def _finish(self, batch: Batch, outcomes: list[Any], *, landed: bool = False) -> None:
        now = self.loop.time()
        self.lane.done(batch, outcomes, now)
        here = False
        armed, self._armed = self._armed, True  # none of the resumed arms the turn: that is done below
        self._now = now  # what they submit at once comes at one time
        try:
            self._wake(iter(batch.tickets))
            here = landed and 0 < len(self._callers) <= self.lane.queued
        finally:
            self._now = 0.0
            self._armed = armed
            if not here:
                self._arm()
        if here:  # every caller has called: a turn would be waited for in vain
            self._tick()

    def _wake(self, tickets: Iterator[Ticket]) -> None:
        """Resume the callers of `tickets`; what they submit next is queued when this returns."""
        hot = HOT.module
        try:
            if hot is not None:
                hot.resume(tickets)
            for ticket in tickets:
                wake = ticket.wake
                if wake is not None:
                    ticket.wake = None
                    ticket.context.run(wake, ticket)
        except BaseException:
            # A task lets only SystemExit and KeyboardInterrupt through; the others still get their results.
            self.loop.call_soon(self._wake, tickets)
            raise

    def resume(self, tickets: Sequence[Ticket]) -> None:
        """Send the callers of tickets on that have ended elsewhere; what they submit comes at one time."""
        self._now = self.loop.time()
        try:
            self._wake(iter(tickets))
        finally:
            self._now = 0.0

    def end(self, ticket: Ticket, error: BaseException) -> None:
        """Give a ticket an error outside of any batch."""
        ticket.value = Failed(error)
        wake = ticket.wake
        if wake is not None:
            ticket.wake = None
            self.loop.call_soon(wake, ticket, context=ticket.context)

    # -- deadlines ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Keep one timer, for the nearest deadline of a call that has not started."""
        at = self.lane.next_deadline
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_at(at, self._overdue)

    def _overdue(self) -> None:
        # A loop's timer may fire up to one clock tick early.
        self._expire(max(self.loop.time(), self._timer_at))

    def _expire(self, now: float) -> None:
        for ticket in self.lane.expire(now):
            waited_ms = (now - ticket.at) * 1e3
            self.end(ticket, DeadlineExceededError(f"not started after {waited_ms:.1f} ms in the queue"))
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, float("inf")
        if self.lane.next_deadline < self._timer_at:
            self._watch()

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new callers, let the known ones end, then close; False if `timeout_s` cut them off.

        The task that drains is not waited for. Callers that have not ended by then get RuntimeClosedError.
        """
        if self.state == STOPPED:
            return True
        self.state = DRAINING
        own = asyncio.current_task(self.loop)
        if own is not None and self._callers.pop(own, None) is not None:
            own.remove_done_callback(self._unregister)
        in_time = True
        if self._callers:
            self._gone = self.loop.create_future()
            await asyncio.wait({self._gone}, timeout=timeout_s)
            in_time = self._gone.done()
        self.close()
        return in_time

    def close(self) -> None:
        """Stop at once: what queues or runs fails with RuntimeClosedError, a running batch is detached."""
        if self.state == STOPPED:
            return
        self.state = STOPPED
        lane = self.lane
        left = lane.abandon()
        lost = self.loop.is_closed()
        for batch in list(self._flying):
            left += [t for t in batch.tickets if t.state == RUNNING and lane.cancel(t)]
            if lost:
                self._lost(batch)
        for ticket in left:
            if lost:
                ticket.wake = None
            self.end(ticket, RuntimeClosedError("the runtime was closed before this call ended"))
        for timer in (self._timer, self._hold):
            if timer is not None:
                timer.cancel()
        self._timer = self._hold = None
        for task in self._callers:
            if not lost:
                task.remove_done_callback(self._unregister)
        self._callers.clear()
        self.alone = None


class Queue:
    """The shortest way into a lane.

    `known(front, ticket)` queues a call without a deadline whose caller, group and place are known, and says
    whether it did; where it did not, `Front.submit` does the work.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: Callable[[Front, Ticket], bool] = _never

    def adopt(self, module: Any) -> None:
        """Queue by the compiled twin, or with None not at all."""
        if module is None:
            self.known = _never
            return
        module.layout(Front, Lane, Group, Slot, Caller, Caps, Stats, Sweep)
        self.known = module.queue


def _never(front: Front, ticket: Ticket) -> bool:
    return False


QUEUE: Final = Queue()
HOT.on_ready(QUEUE.adopt)


class Rest:
    """One loop turn, taken only by a task that is alone on its front; see `Front.rested`."""

    __slots__ = ("_front",)

    def __init__(self, front: Front) -> None:
        self._front = front

    def __await__(self) -> Generator[None, None, bool]:
        front = self._front
        task = asyncio.current_task(front.loop)
        if front.alone is None or front.alone is not task:
            return False
        yield
        if front.alone is not task:
            return False
        front._spent_us = 0.0
        return True
