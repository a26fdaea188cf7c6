"""Batches, waiting times and an excerpt of a timeline: out of a trace, or out of this process."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from layerzero.observe.trace import LOOPS
from layerzero.observe.trace_files import StoredTrace
from layerzero.report.document import OpTraffic, StringTable, TimelineRow, TimelineWindow
from layerzero.runtime import Runtime

MAX_SLICES: Final = 1200
_Event = Mapping[str, Any]


def traffic_of_runtime(runtime: Runtime) -> list[OpTraffic]:
    """What the batchers of this process counted, a row for each device that has run a batch."""
    rows = []
    for where, device in list(runtime.devices.items()):
        stats = device.loop_drivers.stats()
        batches = sum(stats.sizes.values())
        calls = sum(size * count for size, count in stats.sizes.items())
        if batches:
            rows.append(
                OpTraffic(
                    "this process", str(where), batches, calls, _sizes(stats.sizes),
                    mean_wait_ms=stats.wait_s / calls * 1e3, max_wait_ms=stats.wait_max_s * 1e3,
                )
            )  # fmt: skip
    return rows


def traffic_of_trace(trace: StoredTrace) -> list[OpTraffic]:
    """The batches of each op in a trace, with the time that their calls queued."""
    batches: dict[str, list[_Event]] = defaultdict(list)
    waits: dict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "X" and event.get("cat") == LOOPS:
            batches[event["name"]].append(event)
    for op, ms in _queue_times(trace.events):
        waits[op].append(ms)
    return [_traffic(trace.path.name, op, events, waits[op]) for op, events in sorted(batches.items())]


def _traffic(source: str, op: str, events: Sequence[_Event], waits: Sequence[float]) -> OpTraffic:
    sizes = Counter(int(event["args"]["callers"]) for event in events)
    whys = Counter(str(event["args"]["why"]) for event in events)
    return OpTraffic(
        source, op, len(events), sum(size * count for size, count in sizes.items()), _sizes(sizes),
        mean_wait_ms=statistics.mean(waits) if waits else None,
        p95_wait_ms=sorted(waits)[int(len(waits) * 0.95)] if waits else None,
        max_wait_ms=max(waits, default=None),
        whys=tuple(whys.most_common()),
    )  # fmt: skip


def _queue_times(events: Iterable[_Event]) -> Iterator[tuple[str, float]]:
    """Milliseconds in the queue by op: a slice "queued" is inside its call's, on its caller's row."""
    around: dict[tuple[int, int], _Event] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        row = (event["pid"], event["tid"])
        if event["name"] == "queued" and row in around:
            yield around[row]["name"], event["dur"] / 1e3
        else:
            around[row] = event


def _sizes(sizes: Mapping[int, int]) -> tuple[tuple[str, int], ...]:
    return tuple((str(size), count) for size, count in sorted(sizes.items()))


def excerpt_of(trace: StoredTrace) -> TimelineWindow:
    """The slices nearest in time to the trace's largest batch, at most `MAX_SLICES`."""
    slices = [event for event in trace.events if event["ph"] == "X"]
    names = _row_names(trace.events)
    texts = StringTable()
    largest = max(
        (event for event in slices if event.get("cat") == LOOPS),
        key=lambda event: event["args"]["callers"],
        default=None,
    )
    middle_us = largest["ts"] if largest is not None else 0.0
    near = sorted(slices, key=lambda event: abs(event["ts"] - middle_us))[:MAX_SLICES]
    rows: dict[tuple[int, int], list[_Event]] = defaultdict(list)
    for event in sorted(near, key=lambda event: (event["ts"], -event["dur"])):
        rows[event["pid"], event["tid"]].append(event)
    drawn = tuple(
        TimelineRow(names.get(row, str(row)), tuple(_slice(event, texts) for event in rows[row]))
        for row in sorted(rows)
    )
    return TimelineWindow(
        source=trace.path.name,
        begin_us=round(min((event["ts"] for event in near), default=0.0), 1),
        end_us=max((event["ts"] + event["dur"] for event in near), default=0.0),
        left_out=len(slices) - len(near),
        texts=tuple(texts),
        rows=drawn,
    )


def _slice(event: _Event, texts: StringTable) -> tuple[float, float, int, int]:
    args = event.get("args") or {}
    note = ", ".join(f"{name} {_plain(value)}" for name, value in args.items())
    return (round(event["ts"], 1), round(event["dur"], 1), texts.place(str(event["name"])), texts.place(note))


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _row_names(events: Iterable[_Event]) -> dict[tuple[int, int], str]:
    """What each row of a trace is called, its process before it where there are several."""
    processes = {
        e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"
    }
    several = len(processes) > 1
    return {
        (e["pid"], e["tid"]): f"{processes.get(e['pid'], '') + ': ' if several else ''}{e['args']['name']}"
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
