"""What a loop driver tells a timeline: each batch with its callers, and calls that ended outside of one.

A driver that is not watched has no `watch`; then a batch has no record, and asks for nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import torch

from layerzero.observe.device_times import DeviceSpan
from layerzero.observe.trace import CALLERS, COPIES, LOOPS, STREAMS, THREADS, Slice, Trace
from layerzero.scheduler.core.pending_call import (
    CANCELLED,
    DETACHED,
    DONE,
    STATES,
    Batch,
    Caller,
    Failure,
    PendingCall,
)
from layerzero.scheduler.modes.streams import DeviceStreams

if TYPE_CHECKING:
    from layerzero.observe.timeline import Timeline
    from layerzero.scheduler.loop_driver import LoopDriver

_LEFT: Final = (CANCELLED, DETACHED)
# Columns, not a tuple a call: the collector of garbage would walk over all of them again and again.
_CALLER, _SUBMITTED, _STATE = attrgetter("caller"), attrgetter("submitted_at"), attrgetter("state")
# A loop's time is the machine's monotonic clock, but for one that a test invented.
_SAME_CLOCK_S: Final = 0.1
_EVENTS_PER_RUN: Final = 6  # its slices on a thread and on a stream, an arrow to each
_EVENTS_PER_CALL: Final = 4  # its slice, its time in the queue, both ends of its arrow


class BatchWatch:
    """One loop driver's side of a timeline."""

    __slots__ = ("_clock_offset_ns", "_done", "_spawned", "_stats", "row_name", "streams", "timeline")

    def __init__(
        self, driver: LoopDriver, streams: DeviceStreams | None, timeline: Timeline, device: str
    ) -> None:
        self._stats = driver.batcher.stats
        self._done = self._stats.done
        self.streams = streams
        self._spawned = 0
        self.timeline = timeline
        self.row_name = f"batches of {device}"
        offset_s = monotonic() - driver.loop.time()
        self._clock_offset_ns = 0 if abs(offset_s) < _SAME_CLOCK_S else round(offset_s * 1e9)

    def loop_ns(self, loop_s: float) -> int:
        """A time of the driver's loop on the timeline's clock."""
        return round(loop_s * 1e9) + self._clock_offset_ns

    def name(self, caller: Caller, task: Any) -> None:
        """Call a caller's row by its task."""
        if hasattr(task, "get_name"):  # a spawned coroutine has none
            caller.name = task.get_name()
        else:
            self._spawned += 1
            caller.name = f"spawned {self._spawned}"

    def launched(self, batch: Batch) -> BatchRecord:
        """A batch begins."""
        record = BatchRecord(self, batch)
        self.timeline.begin(record)
        return record

    def left(self, call: PendingCall, error: BaseException) -> None:
        """A call has ended outside of a batch: it was cancelled, its deadline passed, the driver closed."""
        self.timeline.add(LeftCall(self, call, error))

    def copying(self, readers: int) -> Callable[[], None]:
        """Copies to the host for so many readers begin; call what comes back when they are there."""
        begin_ns = monotonic_ns()
        return lambda: self.timeline.add(CopyRecord(self, readers, begin_ns, monotonic_ns()))

    def all_done(self, calls: int) -> bool:
        """Whether the batch of so many calls that has just ended gave each its value."""
        done = self._stats.done
        before, self._done = self._done, done
        return done - before == calls


class BatchRecord:
    """One batch on its way through a driver; `why` it was launched then is the batcher's own word."""

    __slots__ = (
        "_answered_ns", "_batch", "_callers", "_end_ns", "_kernel", "_states", "_submitted_s", "_watch",
        "begin_ns", "error", "op", "rows", "runs", "weight", "why",
    )  # fmt: skip

    def __init__(self, watch: BatchWatch, batch: Batch) -> None:
        self._watch = watch
        self._batch: Batch | None = batch  # until it has ended: it holds what its callers get
        self._callers: list[Caller] = []
        self._submitted_s: list[float] = []
        self._states = b""
        self._kernel: str | None = None
        self._end_ns = self._answered_ns = 0
        self.op: str = batch.op.name
        self.why = batch.why
        self.rows = batch.tokens
        self.runs: list[tuple[int, int, int, DeviceSpan | None]] = []
        self.error: str | None = None
        self.weight = 1 + _EVENTS_PER_RUN  # how many events it writes at most
        self.begin_ns = monotonic_ns()

    def _take_calls(self, batch: Batch) -> None:
        calls = batch.calls
        self._callers = list(map(_CALLER, calls))
        at = batch.submitted_at  # by far most often callers that went on together call together
        self._submitted_s = list(map(_SUBMITTED, calls)) if at is None else [at]

    def around(self, execute: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """What runs the batch, timed on its thread; a batch that failed is run again in halves."""
        timeline, streams = self._watch.timeline, self._watch.streams
        marks = timeline.nvtx

        def timed(op: Any, calls: Any, modes: Any, snapshot: Any) -> list[Any]:
            stream = None if streams is None else streams.stream_for(modes)
            span = None if stream is None else timeline.device_times.begin(stream)
            if marks:
                torch.cuda.nvtx.range_push(f"batch {self.op}")
            begin_ns = monotonic_ns()
            try:
                return execute(op, calls, modes, snapshot)
            finally:
                self.runs.append((timeline.this_thread(), begin_ns, monotonic_ns(), span))
                if marks:
                    torch.cuda.nvtx.range_pop()
                if span is not None:
                    timeline.device_times.end(span, stream)

        return timed

    def ended(self, outcomes: list[Any], now_s: float) -> None:
        """Its callers have their outcomes, from `now_s` of the loop's time on."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._end_ns = monotonic_ns()
        self._answered_ns = self._watch.loop_ns(now_s)
        self._take_calls(batch)
        self.weight = 1 + _EVENTS_PER_RUN * len(self.runs) + _EVENTS_PER_CALL * len(outcomes)
        if not self._watch.all_done(len(outcomes)):
            self._states = bytes(map(_STATE, batch.calls))
            errors = (type(each.error).__name__ for each in outcomes if isinstance(each, Failure))
            self.error = next(errors, None)
        elif outcomes[0].__class__ is tuple and outcomes[0][1] is not None:
            self._kernel = outcomes[0][1].kernel
        self._watch.timeline.add(self)

    def write(self, trace: Trace) -> None:
        """The batch, its runs on a thread and on a stream, its callers, and the arrows between them."""
        row = (LOOPS, self._watch)
        trace.name_row(row, self._watch.row_name)
        batch, unfinished = self._batch, self._batch is not None
        if batch is not None:
            self._take_calls(batch)
            self._states = bytes(map(_STATE, batch.calls))
        end_ns = trace.end_ns if unfinished else self._end_ns
        kernels: dict[str, None] = {}
        for thread, begin_ns, run_end_ns, _ in self.runs:
            kernels.update(dict.fromkeys(trace.kernels_in(thread, begin_ns, run_end_ns)))
        if not kernels and self._kernel is not None:
            kernels[self._kernel] = None
        facts: dict[str, Any] = {
            "why": self.why, "callers": len(self._callers), "rows": self.rows, "kernels": list(kernels),
        }  # fmt: skip
        if self.error is not None:
            facts["raised"] = self.error
        if unfinished:
            facts["unfinished"] = True
        cancelled = sum(map(self._states.count, _LEFT))
        if cancelled:
            facts["cancelled"] = cancelled
        slice_of_batch = trace.slice(row, self.op, self.begin_ns, end_ns, **facts)
        for run in self.runs:
            self._write_run(trace, slice_of_batch, *run)
        answered_ns = trace.end_ns if unfinished else max(self._answered_ns, self.begin_ns)
        states = self._states or bytes([DONE]) * len(self._callers)
        submitted_s = self._submitted_s
        if len(submitted_s) < len(self._callers):
            submitted_s = submitted_s * len(self._callers)
        for call in zip(self._callers, submitted_s, states, strict=True):
            self._write_call(trace, slice_of_batch, answered_ns, *call)

    def _write_run(
        self, trace: Trace, batch: Slice, thread: int, begin_ns: int, end_ns: int, span: DeviceSpan | None
    ) -> None:
        run = trace.slice((THREADS, thread), f"run {self.op}", begin_ns, end_ns)
        if run.begin_ns > batch.begin_ns:
            trace.arrow(batch, run)
        if span is not None and span.begin_ns is not None and span.end_ns is not None:
            row = (STREAMS, (span.device, span.stream))
            trace.name_row(row, f"cuda:{span.device} stream {span.stream}")
            # Two clocks: no stream runs what has not been launched.
            began_ns = max(span.begin_ns, batch.begin_ns)
            trace.arrow(batch, trace.slice(row, self.op, began_ns, span.end_ns, rows=self.rows))

    def _write_call(
        self, trace: Trace, batch: Slice, end_ns: int, caller: Caller, submitted_s: float, state: int
    ) -> None:
        begin_ns = min(self._watch.loop_ns(submitted_s), self.begin_ns)
        if state in _LEFT:
            return  # `LeftCall` has its slice, which ended before the batch
        row = _row_of(trace, caller)
        call = trace.slice(row, self.op, begin_ns, end_ns, outcome=STATES[state])
        trace.slice(row, "queued", begin_ns, self.begin_ns)
        trace.arrow(call, batch)


@dataclass(frozen=True, eq=False)
class CopyRecord:
    """Results on their way to the host, those of one turn of the loop together."""

    weight = 1

    _watch: BatchWatch
    _readers: int
    _begin_ns: int
    _end_ns: int

    def write(self, trace: Trace) -> None:
        """A slice on the row of copies."""
        row = (COPIES, self._watch)
        trace.name_row(row, "copies to the host")
        trace.slice(row, "to_host", self._begin_ns, self._end_ns, readers=self._readers)


class LeftCall:
    """A call that ended outside of a batch."""

    __slots__ = ("_begin_ns", "_caller", "_end_ns", "_error", "_op", "_state")

    weight = 1

    def __init__(self, watch: BatchWatch, call: PendingCall, error: BaseException) -> None:
        self._begin_ns = watch.loop_ns(call.submitted_at)
        self._end_ns = monotonic_ns()
        assert call.caller is not None  # it was submitted
        self._caller: Caller = call.caller
        self._op: str = call.op.name
        self._state = call.state
        self._error = type(error).__name__

    def write(self, trace: Trace) -> None:
        """A slice on its caller's row."""
        state = STATES[CANCELLED if self._state == DETACHED else self._state]
        trace.slice(
            _row_of(trace, self._caller),
            self._op,
            self._begin_ns,
            self._end_ns,
            outcome=state,
            raised=self._error,
        )


def _row_of(trace: Trace, caller: Caller) -> tuple[str, Caller]:
    row = (CALLERS, caller)
    trace.name_row(row, caller.name or "caller")
    return row
