"""Running a driver's batches: on the loop's thread, on the worker's, or on a device that answers early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from layerzero._util import log
from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.bisect import Executor, bisect_failed_batch
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.pending_call import (
    FAILED,
    PENDING_CALL,
    RUNNING,
    Batch,
    Failure,
    LateResults,
    PendingCall,
)
from layerzero.scheduler.core.round_robin import BatchQueue
from layerzero.scheduler.modes.streams import HOST, CrossStreamModes, DeviceStreams
from layerzero.scheduler.modes.torch_modes import Modes
from layerzero.spec.errors import RuntimeClosedError

if TYPE_CHECKING:
    from layerzero.scheduler.loop_driver import LoopDriver

TURN_S = 5e-4  # what one turn of a loop that serves many callers may take
# A batch waits so many turns at most for callers that were resumed: so far it is from the end of a task, or
# the other side of a queue, to the call that follows. Else callers that were once apart never meet.
MOST_TURNS = 6
MOST = 7 / 8  # of those that were resumed make the turns worth it
MOST_UNWAITED = 63  # batches of a group for which no turn is waited, where that was in vain
STOPPED = "stopped"  # the state of a driver that takes no call any more
LOOP_CLOSED = "loop_driver.loop_closed"
_UNTRACED = nullcontext()


class BatchRuns:
    """What a driver's batches run on, and those that are under way (`inflight`).

    Every method belongs to the loop's thread, unless it says otherwise.
    """

    __slots__ = (
        "_asked", "_batch_done", "_completed", "_driver", "_executor", "_is_interrupted", "_last_modes",
        "_late", "_lock", "_loop_closed_noted", "_resumed", "_turns", "_worker", "_yielded", "inflight",
        "streams",
    )  # fmt: skip

    def __init__(
        self, driver: LoopDriver, executor: Executor, worker: Worker, streams: DeviceStreams | None
    ) -> None:
        self._driver = driver
        self._batch_done, self._completed = self.whole(self._on_batch_done), self.whole(self._on_completed)
        self._executor = executor
        self._worker = worker
        self.streams = streams
        self.inflight: list[Batch] = []
        self._late: list[Batch] = []  # that have run, and whose results others bring
        self._last_modes: Modes | CrossStreamModes | None = None  # of the batch that was launched last
        self._asked = False  # whether the device is to say when it has run
        self._loop_closed_noted = self._is_interrupted = False
        self._yielded = False  # whether the last turn launched nothing, for readers
        # Of the last batch whose callers have not all called again: its group, size, and the calls before.
        self._resumed: tuple[BatchQueue, int, int] | None = None
        self._turns = 0  # that were waited for them
        self._lock = threading.Lock()  # for the end of a loop driver whose loop is closed: see _drop

    # -- changes that are cut short ----------------------------------------------------------------

    def submit(self, call: PendingCall, now_s: float) -> bool:
        """As `Batcher.submit`, in its caller's step."""
        try:
            return self._driver.batcher.submit(call, now_s)
        except ValueError:  # its own
            raise
        except Exception as error:
            self.interrupted(error)
            raise

    def whole(self, step: Callable[..., None]) -> Callable[..., None]:
        """A callback of the loop that does `step`, all of it, or has every caller get the error.

        What a signal handler raises in the loop's own code, before this begins, is not seen here: the loop
        ends by it, or drops this callback as it would any future's.
        """

        def callback(*given: Any) -> None:
            if self._is_interrupted:
                return
            try:
                step(*given)
            except Exception as error:
                self.interrupted(error)
                raise

        return callback

    def interrupted(self, error: Exception) -> None:
        """A signal handler has raised in the middle of a change: nothing counts or queues right from here on.

        All that wait get its error, and the driver is not used any more: the next call makes another one.
        """
        driver, batcher = self._driver, self._driver.batcher
        if self._is_interrupted:
            return
        self._is_interrupted = True
        driver.state, driver.sole_caller, batcher.draining = STOPPED, None, True
        lines = [line for queue in batcher.round_robin.all_queues() for line in queue.by_priority]
        # A call that no queue and no batch has just then is what its task waits for.
        awaited = [getattr(task, "_fut_waiter", None) for task in driver._callers]
        batches = [batch.calls for batch in (*self.inflight, *self._late)]
        calls = dict.fromkeys(chain(*lines, *batches, batcher._waiting_for_room, awaited))
        self.inflight.clear()
        self._late.clear()
        for call in calls:
            if isinstance(call, PENDING_CALL.cls | PendingCall) and call.driver is driver:
                if call.state <= RUNNING:
                    call.state, call.args = FAILED, ()
                    driver.fail(call, error)
                elif call.wake is not None:
                    wake, call.wake = call.wake, None
                    driver.loop.call_soon(wake, call, context=call.context)
        driver._deadlines.cancel()
        driver._hold_end.cancel()
        driver.inline.close(error)
        if driver.on_interrupted is not None:
            driver.on_interrupted(driver)

    # -- batches -----------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> None:
        """Run a batch here where it is short or the loop runs in the worker's own job, else on the worker."""
        driver = self._driver
        if driver.watch is not None:
            batch.record = driver.watch.launched(batch)
        if driver.readback is not None:
            driver.readback.flush(None if batch.launch is None else batch.launch.number - 1)
        if batch.expected_us < driver.inline_limit_us or self._worker.inside:
            try:
                outcomes = self._execute(batch)
            except BaseException as error:  # the interpreter is being stopped: no caller is left behind
                driver.complete(batch, batch.interrupted(error))
                raise
            if driver.batcher.expected_callers is not None and batch.launch is not None:
                driver.batcher.expected_callers.handed_over(batch.launch, driver.loop.time())
            if self.streams is None or self._answers_early:
                self._complete(batch, outcomes)
            else:
                self.inflight.append(batch)
                self._notify_when_done(batch, outcomes)
            return
        self.inflight.append(batch)
        try:
            self._worker.submit(partial(self._execute_on_worker, batch))
        except RuntimeClosedError as error:
            self.inflight.remove(batch)
            self._driver.complete(batch, [Failure(error)] * len(batch))

    def _execute(self, batch: Batch) -> list[Any]:
        op, modes, snapshot, execute = batch.op, batch.modes, batch.snapshot, self._executor.execute
        if self.streams is not None:
            modes = batch.modes = self._last_modes = self.streams.modes_of(batch.calls)
        if batch.record is not None:
            execute = batch.record.around(execute)
        spans = self._executor.spans
        traced: Any = _UNTRACED if spans is None else spans.batch(op.name, batch.calls)
        began_s = time.perf_counter()
        with traced as fails:
            outcomes = bisect_failed_batch(
                lambda calls: execute(op, calls, modes, snapshot), batch.args_list, pure=op.pure
            )
            if fails is not None:
                for failure in [each for each in outcomes if each.__class__ is Failure][:1]:
                    fails(failure.error)
        batch.ran_us = (time.perf_counter() - began_s) * 1e6
        return outcomes

    def _execute_on_worker(self, batch: Batch) -> None:
        """On the worker's thread."""
        try:
            outcomes = self._execute(batch)
        except BaseException as error:
            outcomes = batch.interrupted(error)
        self._hand_to_loop(batch, outcomes)

    def _notify_when_done(self, batch: Batch, outcomes: list[Any]) -> None:
        """Answer a launched batch's callers when it has run."""
        assert self.streams is not None
        try:
            self.streams.notify_when_done(batch.modes, partial(self._on_event_done, batch, outcomes))
        except RuntimeClosedError as error:
            self._on_batch_done(batch, [Failure(error)] * len(batch))

    def _on_event_done(self, batch: Batch, outcomes: list[Any], error: Exception | None) -> None:
        """On the event thread: a launched batch has run, or its device has failed."""
        if error is not None:
            outcomes = [Failure(error)] * len(batch)
        self._hand_to_loop(batch, outcomes)

    def _hand_to_loop(self, batch: Batch, outcomes: list[Any]) -> None:
        """From another thread: complete a batch in the loop's next turn, in one wake for all its callers."""
        try:
            self._driver.loop.call_soon_threadsafe(self._batch_done, batch, outcomes)
        except RuntimeError:
            self.note_loop_closed(len(batch))
            self._drop(batch)

    def note_loop_closed(self, calls: int) -> None:
        """From another thread: results came after the loop's end, as `asyncio.run` may end; logged once."""
        with self._lock:
            noted, self._loop_closed_noted = self._loop_closed_noted, True
        if not noted:
            log.debug(LOOP_CLOSED, calls=calls)

    def _on_batch_done(self, batch: Batch, outcomes: list[Any]) -> None:
        driver = self._driver
        try:
            (self._late if batch.is_late else self.inflight).remove(batch)
        except ValueError:  # it was given up
            return
        if batch.is_late:
            driver.complete(batch, outcomes)
            return
        expected = driver.batcher.expected_callers
        if expected is not None and batch.launch is not None:
            if self._answers_early:  # the worker has launched it, and the device runs it from now on
                expected.handed_over(batch.launch, driver.loop.time())
            else:
                driver.completed(batch.launch.number, ticks=False)
        self._complete(batch, outcomes)

    def _complete(self, batch: Batch, outcomes: list[Any]) -> None:
        """A batch has run: its callers continue, now or when others have finished what it began."""
        late = LateResults.among(outcomes)
        if late is None:
            self._driver.complete(batch, outcomes)
            return
        self._driver.batcher.on_batch_late(batch)
        self._late.append(batch)
        self._driver.schedule_tick()
        late.notify(partial(self._hand_to_loop, batch))

    def give_up(self, op: Any, error: Exception) -> None:
        """Fail the callers of the batches of `op` that are under way; what these still give is dropped."""
        for batch in [each for each in (*self.inflight, *self._late) if each.op is op]:
            self._on_batch_done(batch, [Failure(error)] * len(batch))

    @property
    def _answers_early(self) -> bool:
        """Whether callers continue when their batch is launched, before the device has run it."""
        return self.streams is not None and self.streams.completion != HOST

    def _drop(self, batch: Batch) -> None:
        """The loop was closed under a batch: only the counts are brought to an end.

        The worker that finds the loop closed calls it, or `close`; nothing else uses the batcher then.
        """
        with self._lock:
            batches = self._late if batch.is_late else self.inflight
            if batch not in batches:
                return
            batches.remove(batch)
            batcher = self._driver.batcher
            for call in batch.calls:
                batcher.cancel(call)
            batcher.on_batch_done(batch, [None] * len(batch), batch.started)

    def abandon(self, *, loop_closed: bool) -> list[PendingCall]:
        """Detach every call that is under way; the calls, for their error."""
        batcher = self._driver.batcher
        detached: list[PendingCall] = []
        for batch in (*self.inflight, *self._late):
            detached += [call for call in batch.calls if call.state == RUNNING and batcher.cancel(call)]
            if loop_closed:
                self._drop(batch)
        return detached

    def yields(self, now_s: float) -> bool:
        """Whether this turn launches nothing, for a caller that is about to call."""
        if self._resumed is not None:
            return self._yields_to_resumed()
        return self._yields_to_readers(now_s)

    def resumed(self, batch: Batch, submitted: int) -> None:
        """A batch's callers were resumed and have not all called; before there were `submitted` calls."""
        queue = batch.queue
        if self.streams is not None or queue is None:
            return
        if queue.unwaited:
            queue.unwaited -= 1
        else:
            self._resumed, self._turns = (queue, len(batch), submitted), 0

    def _yields_to_resumed(self) -> bool:
        """Whether callers that were resumed, or others in their place, are about to call."""
        assert self._resumed is not None
        (queue, size, submitted), batcher = self._resumed, self._driver.batcher
        if not batcher.queued:
            return False
        called = batcher.stats.submitted - submitted
        if called < size and self._turns < MOST_TURNS and not batcher.hurries:
            self._turns += 1
            return True
        self._resumed = None
        if self._turns:
            queue.vain = 0 if called >= MOST * size else min(2 * queue.vain + 1, MOST_UNWAITED)
            queue.unwaited = queue.vain
        return False

    def _yields_to_readers(self, now_s: float) -> bool:
        """Whether a turn more costs nothing: what is launched waits behind a batch that still runs.

        Tasks that were started with the calls that wait, to read results of that batch, come first: a copy
        that is launched after the next batch would be there only after it.
        """
        expected = self._driver.batcher.expected_callers
        self._yielded = (
            not self._yielded
            and expected is not None
            and self._driver.readback is not None
            and expected.busy_s(now_s) > TURN_S
        )
        return self._yielded

    # -- what the device has run -------------------------------------------------------------------

    def ask_device(self, expected: ExpectedCallers) -> None:
        """Have the device say when it has run what was launched so far: a hold ends by it."""
        if self._asked or (self.inflight and self._answers_early):  # asked when the worker has launched it
            return
        assert self.streams is not None and self._last_modes is not None
        self._asked = True
        try:
            self.streams.notify_when_done(self._last_modes, partial(self._device_ran, expected.launches))
        except RuntimeClosedError:  # it is never reported: no hold waits for it, and the next one asks again
            self._on_completed(expected.launches)

    def _device_ran(self, launches: int, error: Exception | None) -> None:
        """On the event thread; an error of the device is for those that read its results."""
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            self._driver.loop.call_soon_threadsafe(self._completed, launches)

    def _on_completed(self, launches: int) -> None:
        self._asked = False
        self._driver.completed(launches)
