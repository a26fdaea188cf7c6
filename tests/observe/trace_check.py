"""What the trace-event format asks of a file, checked event by event; raises where one does not hold."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PHASES = {"X", "B", "E", "s", "t", "f", "M"}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
NEAR_US = 0.0015  # times are written in thousandths of a microsecond


def check_trace(data: bytes) -> Event:
    """The trace, where it is one that Perfetto and chrome://tracing can read."""
    trace: Event = json.loads(data)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in PHASES, event
        assert isinstance(event["pid"], int) and isinstance(event["name"], str), event
        if event["ph"] == "M":
            assert event["name"] in METADATA and event["args"], event
        else:
            assert isinstance(event["tid"], int) and event["ts"] >= 0.0, event
            rows[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(rows) <= named
    for events in rows.values():
        check_row(events)
    check_flows(rows)
    return trace


def check_row(events: list[Event]) -> None:
    """Times rise, every slice has an end, and slices stand inside each other or apart."""
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    open_ends: list[float] = []
    begun = 0
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
            while open_ends and open_ends[-1] <= event["ts"] + NEAR_US:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + NEAR_US, event
            open_ends.append(end)
        begun += {"B": 1, "E": -1}.get(event["ph"], 0)
        assert begun >= 0, event
    assert begun == 0


def check_flows(rows: dict[tuple[int, int], list[Event]]) -> None:
    """Each arrow has one beginning and one end, not before it, and each end is inside a slice of its row."""
    ends: dict[Any, list[Event]] = defaultdict(list)
    for events in rows.values():
        slices = [event for event in events if event["ph"] == "X"]
        for event in events:
            if event["ph"] not in "sf":
                continue
            ends[event["id"]].append(event)
            at = event["ts"]
            assert any(s["ts"] - NEAR_US <= at <= s["ts"] + s["dur"] + NEAR_US for s in slices), event
            assert event["ph"] == "s" or event["bp"] == "e"
    for pair in ends.values():
        assert sorted(event["ph"] for event in pair) == ["f", "s"], pair
        begin, end = sorted(pair, key=lambda event: event["ph"], reverse=True)
        assert begin["ts"] <= end["ts"] + NEAR_US, pair


def read_trace(path: Path) -> Event:
    """A file that was checked."""
    return check_trace(path.read_bytes())


def slices(trace: Event, category: str, name: str | None = None) -> list[Event]:
    """The slices of one kind of row, of one name."""
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["cat"] == category and name in (None, event["name"])
    ]


def row_names(trace: Event) -> dict[tuple[int, int], str]:
    """What each row is called."""
    return {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }


def arrows_into(trace: Event, target: Event) -> list[Event]:
    """The beginnings of the arrows that end where a slice begins."""
    events = trace["traceEvents"]
    place = (target["pid"], target["tid"], target["ts"])
    ids = {e["id"] for e in events if e["ph"] == "f" and (e["pid"], e["tid"], e["ts"]) == place}
    return [e for e in events if e["ph"] == "s" and e["id"] in ids]
