"""Traces on disk: read with a check, those of several ranks made one, and what one of them says in numbers.

Clocks are put side by side by a stated rule. Processes of one boot of one machine share its monotonic clock:
that one counts, exactly. Otherwise the time of day of each machine counts, as good as their clocks agree.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from layerzero._util.files import decode_json, read_given
from layerzero.observe.trace import FORMAT, LOOPS, STREAMS, THREADS, encode_trace
from layerzero.spec.errors import ConfigurationError

MAX_BYTES: Final = 1 << 30
MONOTONIC: Final = "monotonic clock of one boot"
WALL: Final = "time of day"


class _ProcessFacts(msgspec.Struct):
    pid: int
    rank: int | None
    host: str
    boot: str | None
    begin_ns: int
    begin_unix_ns: int
    seconds: float
    dropped_events: int = 0
    unfinished_batches: int = 0
    unread_device_times: int = 0


class _FileFacts(msgspec.Struct):
    format: int
    processes: list[dict[str, Any]]


class _File(msgspec.Struct):
    traceEvents: list[dict[str, Any]]
    otherData: _FileFacts


class StoredTrace:
    """A trace that was read: its events, and of each process its facts as written (`raw`) and as checked."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises: ConfigurationError: the file cannot be read, or is no trace that a timeline wrote."""
        self.path = Path(path)
        try:
            stored = decode_json(read_given(path, MAX_BYTES), _File)
            self.raw = stored.otherData.processes
            self.processes = msgspec.convert(self.raw, list[_ProcessFacts])
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            message = f"{self.path} needs to be a trace that lz.timeline wrote: {why}"
            raise ConfigurationError(message, path=str(path)) from error
        if stored.otherData.format != FORMAT or not self.processes:
            message = f"{self.path} needs a trace of format {FORMAT}, got format {stored.otherData.format}"
            raise ConfigurationError(message, path=str(path))
        self.events = stored.traceEvents

    def begin_ns(self, clock: str) -> int:
        """When its time 0 was, on a clock."""
        return min(each.begin_ns if clock == MONOTONIC else each.begin_unix_ns for each in self.processes)


def merge_traces(paths: Sequence[str | os.PathLike[str]]) -> bytes:
    """One trace of several: a row of rows for each process, in the order of ranks, on one clock.

    Raises: ConfigurationError: a file cannot be read, or is no trace; no file is named.
    """
    if not paths:
        raise ConfigurationError("paths needs at least one trace, got none")
    traces = [StoredTrace(path) for path in paths]
    boots = {process.boot for trace in traces for process in trace.processes}
    clock = MONOTONIC if len(boots) == 1 and None not in boots else WALL
    zero_ns = min(trace.begin_ns(clock) for trace in traces)
    everybody = [(trace, process) for trace in traces for process in trace.processes]
    everybody.sort(key=lambda each: (each[1].rank is None, each[1].rank or 0))
    pids = {(id(trace), process.pid): number for number, (trace, process) in enumerate(everybody, 1)}
    events: list[dict[str, Any]] = []
    flows = 0
    for trace in traces:
        shift_us = (trace.begin_ns(clock) - zero_ns) / 1e3
        highest = 0
        for event in trace.events:
            moved = {**event, "pid": pids[id(trace), event["pid"]]}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift_us
            if "id" in event:
                highest = max(highest, event["id"])
                moved["id"] = event["id"] + flows
            if event["name"] != "process_sort_index":
                events.append(moved)
        flows += highest
    for number in pids.values():
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        )
    facts = [{**raw, "pid": pids[id(trace), raw["pid"]]} for trace in traces for raw in trace.raw]
    facts.sort(key=lambda each: int(each["pid"]))
    return encode_trace(events, {"format": FORMAT, "aligned_by": clock, "processes": facts})


class OpBatches(msgspec.Struct):
    """What a trace says of the batches of one op: how many, how large, how long, and why then."""

    op: str
    batches: int
    callers: float
    rows: float
    ms: float
    whys: dict[str, int]
    kernels: list[str]


class TimedName(msgspec.Struct):
    """How often something ran, and how long in all."""

    where: str
    name: str
    runs: int
    ms: float


class TraceSummary(msgspec.Struct):
    """A trace in numbers."""

    processes: int
    seconds: float
    dropped_events: int
    unfinished_batches: int
    batches: list[OpBatches]
    longest: list[TimedName]


def summarize(trace: StoredTrace, top: int = 20) -> TraceSummary:
    """The batches of each op, and the `top` kernels and stream spans that took longest in all."""
    slices = [event for event in trace.events if event["ph"] == "X"]
    by_op: dict[str, list[dict[str, Any]]] = defaultdict(list)
    totals: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in slices:
        if event["cat"] == LOOPS:
            by_op[event["name"]].append(event)
        elif event["cat"] in (THREADS, STREAMS) and not event["name"].startswith("run "):
            totals[event["cat"], event["name"]].append(event["dur"])
    longest = sorted(totals.items(), key=lambda each: -sum(each[1]))[:top]
    return TraceSummary(
        processes=len(trace.processes),
        seconds=max(process.seconds for process in trace.processes),
        dropped_events=sum(process.dropped_events for process in trace.processes),
        unfinished_batches=sum(process.unfinished_batches for process in trace.processes),
        batches=[_batches_of(op, events) for op, events in sorted(by_op.items())],
        longest=[TimedName(where, name, len(us), sum(us) / 1e3) for (where, name), us in longest],
    )


def _batches_of(op: str, events: Sequence[dict[str, Any]]) -> OpBatches:
    kernels = dict.fromkeys(kernel for event in events for kernel in event["args"]["kernels"])
    return OpBatches(
        op=op,
        batches=len(events),
        callers=_mean(event["args"]["callers"] for event in events),
        rows=_mean(event["args"]["rows"] for event in events),
        ms=_mean(event["dur"] / 1e3 for event in events),
        whys=dict(Counter(event["args"]["why"] for event in events).most_common()),
        kernels=list(kernels),
    )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
