"""A timeline of this process: what ran when, for whom and why then, as a Chrome trace.

A timeline is beside the hot path, never in it. Kernels are seen by a middleware of their plans, as spans
are; a loop driver tells of each batch, not of each call. Without a timeline no plan is wrapped, and a batch
asks one attribute whether anybody watches. What is seen is kept in a ring of at most `max_events` events,
and made into JSON when the timeline ends.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final, Protocol

import anyio
import torch

from layerzero._util import log
from layerzero._util.files import need_own, replace_own
from layerzero._util.fork_safety import renew_after_fork
from layerzero.observe.device_times import DeviceTimes
from layerzero.observe.trace import Trace, own_rank, process_facts
from layerzero.ops.checks import need_int
from layerzero.ops.op import Op
from layerzero.selection.record import Selection
from layerzero.spec.errors import ConfigurationError

MAX_EVENTS: Final = 500_000
MIN_EVENTS: Final = 1_000
FIELD: Final = "traceEvents"  # what a file must have in front that a new trace may replace
NO_NVTX = "timeline.no_nvtx"
NOT_WRITTEN = "timeline.not_written"
EVENTS_DROPPED = "timeline.events_dropped"


class TimelineRecord(Protocol):
    """What a timeline keeps: it weighs as many events as it writes."""

    @property
    def weight(self) -> int: ...

    def write(self, trace: Trace) -> None:
        """Add its slices and arrows to a trace."""


class TimedDevice(Protocol):
    """A device, as a timeline sees it."""

    @property
    def device(self) -> object:
        """Where it is; its text names the rows."""

    @property
    def loop_drivers(self) -> Any:
        """What queues its awaited calls."""

    def add_middleware(self, middleware: Any) -> None: ...

    def remove_middleware(self, middleware: Any) -> None: ...


class Timeline:
    """Records what the devices of this process run, from `start` or entering it until `stop` or leaving it.

    One at a time in a process. `{pid}` and `{rank}` in `path` stand for this process's numbers.
    `kernels` also records each kernel by itself, `nvtx` marks batches and kernels as NVTX ranges where CUDA
    is there, `max_events` bounds the memory: the oldest events are dropped, and the trace says how many.
    """

    reads_arguments = False  # as a middleware of plans: times calls, whatever they are given

    def __init__(
        self,
        path: str | os.PathLike[str],
        devices: Callable[[], Iterable[TimedDevice]],
        *,
        kernels: bool = True,
        nvtx: bool = False,
        max_events: int = MAX_EVENTS,
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigurationError(f"path needs the path of a file, got {path!r}", field="path")
        need_int("max_events", max_events, low=MIN_EVENTS)
        filled = os.fspath(path).replace("{pid}", str(os.getpid()))
        self.path = Path(filled.replace("{rank}", str(own_rank() or 0)))
        self.facts: dict[str, Any] = {}  # of this process, from `start` on
        self.kernels = kernels
        self.max_events = max_events
        self.nvtx = nvtx and torch.cuda.is_available()
        if nvtx and not self.nvtx:
            log.warning(NO_NVTX, why="torch finds no CUDA device")
        self.dropped_events = 0
        self.device_times = DeviceTimes()
        self.thread_names: dict[int, str] = {}
        self._devices = devices
        self._attached: list[TimedDevice] = []
        self._records: deque[TimelineRecord | tuple[Any, ...]] = deque()
        self._events = 0
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        self._begin_ns = self._end_ns = 0

    # -- on and off --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record; the file is written when the process ends, if it is not stopped before.

        Raises: ConfigurationError: another timeline runs, this one has run, or no file can be written there.
        """
        if self._begin_ns:
            raise ConfigurationError("this timeline has run; make another with lz.timeline()", field="path")
        self._check_path()
        self.facts = process_facts()
        RUNNING.begin(self)
        self._begin_ns = monotonic_ns()
        atexit.register(self.finish)
        for device in self._devices():
            self.attach(device)

    def attach(self, device: TimedDevice) -> None:
        """Record what this device runs, too."""
        with self._lock:
            if device in self._attached:
                return
            self._attached.append(device)
        if self.kernels:
            device.add_middleware(self)
        device.loop_drivers.watch(self, str(device.device))

    def stop(self) -> None:
        """End recording; nothing of it stays attached. A second call does nothing."""
        if self._end_ns or not self._begin_ns:
            return
        self._end_ns = monotonic_ns()
        RUNNING.end(self)
        atexit.unregister(self.finish)
        with self._lock:
            attached, self._attached = self._attached, []
        for device in attached:
            device.loop_drivers.watch(None)
            if self.kernels:
                device.remove_middleware(self)

    def save(self) -> None:
        """Write the trace to `path`, whole or not at all.

        Raises: OSError: it cannot be written; what was there stays.
        """
        if self.facts.get("pid") == os.getpid():  # the file of a forked child's parent is not the child's
            replace_own(self.path, self.encode(), FIELD)

    def _check_path(self) -> None:
        try:
            need_own(self.path, FIELD)
            folder = self.path.parent
            while not folder.exists():
                folder = folder.parent
            if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"{folder} is no folder that can be written")
        except OSError as error:
            message = f"path needs a place where a trace can be written, got {str(self.path)!r}: {error}"
            raise ConfigurationError(message, field="path", path=str(self.path)) from error

    def finish(self) -> None:
        """Stop and save; where the trace cannot be written, that is logged."""
        self.stop()
        try:
            self.save()
        except OSError as error:
            log.error(NOT_WRITTEN, path=str(self.path), error=str(error))

    def __enter__(self) -> Timeline:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
        self.save()

    async def __aenter__(self) -> Timeline:
        await anyio.to_thread.run_sync(self.start)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.stop()
        await anyio.to_thread.run_sync(self.save)

    # -- what is recorded --------------------------------------------------------------------------

    def begin(self, record: TimelineRecord) -> None:
        """Something began that ends with `add`; where it does not, it is written as unfinished."""
        self._open[record] = None

    def add(self, record: TimelineRecord) -> None:
        """Keep what has ended; the oldest goes where the ring is full."""
        self._open.pop(record, None)
        self._keep(record, record.weight)

    def _keep(self, record: TimelineRecord | tuple[Any, ...], weight: int) -> None:
        with self._lock:
            self._records.append(record)
            self._events += weight
            if self._events > self.max_events:
                self._drop()

    def this_thread(self) -> int:
        """The number of the calling thread, whose name is remembered."""
        thread = threading.get_ident()
        if thread not in self.thread_names:
            self.thread_names[thread] = threading.current_thread().name
        return thread

    def _add_kernel(self, kernel: str, begin_ns: int, end_ns: int, error: str | None) -> None:
        self._keep((kernel, self.this_thread(), begin_ns, end_ns, error), 1)

    def _drop(self) -> None:
        if not self.dropped_events:
            log.info(EVENTS_DROPPED, kept=self.max_events, path=str(self.path))
        while self._events > self.max_events:
            oldest = self._records.popleft()
            weight = 1 if isinstance(oldest, tuple) else oldest.weight
            self._events -= weight
            self.dropped_events += weight

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed on its thread; a graph capture runs no Python later."""
        if "capture" in selection.request.modes:
            return call
        kernel, add, clock = selection.kernel, self._add_kernel, monotonic_ns

        def timed(*args: Any) -> Any:
            begin_ns = clock()
            try:
                result = call(*args)
            except BaseException as error:
                add(kernel, begin_ns, clock(), type(error).__name__)
                raise
            add(kernel, begin_ns, clock(), None)
            return result

        if not self.nvtx:
            return timed

        def marked(*args: Any) -> Any:
            with torch.cuda.nvtx.range(kernel):
                return timed(*args)

        return marked

    # -- the file ----------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The trace as JSON."""
        end_ns = self._end_ns or monotonic_ns()
        with self._lock:
            records = list(self._records)
        unfinished = list(self._open)
        trace = Trace(self._begin_ns, end_ns, self.facts, self.thread_names)
        self.device_times.resolve()
        trace.add_kernels([record for record in records if isinstance(record, tuple)])
        for record in (*records, *unfinished):
            if not isinstance(record, tuple):
                record.write(trace)
        return trace.encode(
            max_events=self.max_events,
            dropped_events=self.dropped_events,
            unfinished_batches=len(unfinished),
            unread_device_times=self.device_times.unread,
        )


class RunningTimeline:
    """The timeline of this process, where one runs; None costs the opening of a device one look."""

    __slots__ = ("__weakref__", "_lock", "timeline")

    timeline: Timeline | None

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def begin(self, timeline: Timeline) -> None:
        """Make `timeline` the one.

        Raises: ConfigurationError: another one runs.
        """
        with self._lock:
            if self.timeline is not None:
                message = f"a timeline runs in this process already, into {self.timeline.path}; one at a time"
                raise ConfigurationError(message, field="path", path=str(timeline.path))
            self.timeline = timeline

    def end(self, timeline: Timeline) -> None:
        """Let another one begin."""
        with self._lock:
            if self.timeline is timeline:
                self.timeline = None

    def attach(self, device: TimedDevice) -> None:
        """Let the timeline that runs, if one does, record what a new device runs."""
        if self.timeline is not None:
            self.timeline.attach(device)

    def after_fork(self) -> None:
        """In a forked child: what runs is the parent's."""
        self._lock = threading.Lock()
        self.timeline = None


RUNNING: Final = RunningTimeline()
