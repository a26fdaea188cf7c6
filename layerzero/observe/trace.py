"""A Chrome trace: rows of slices with arrows between them, in the JSON that Perfetto opens.

The format is the "Trace Event Format" of the Chromium project. Of it are used: complete events (`X`), flow
events (`s` and `f`), and metadata (`M`). Times are microseconds since the timeline began.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

FORMAT: Final = 1
LOOPS, COPIES, THREADS, STREAMS, CALLERS = "batches", "copies", "thread", "stream", "caller"
# The order of the rows of one process.
_ORDER: Final = {LOOPS: 0, COPIES: 1, THREADS: 2, STREAMS: 3, CALLERS: 4}
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Row = tuple[str, Hashable]  # its kind and what it is about


class Slice:
    """One thing that lasted: a rectangle on a row."""

    __slots__ = ("args", "begin_ns", "end_ns", "name", "row", "tid")

    def __init__(self, row: Row, name: str, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        self.row = row
        self.name = name
        self.begin_ns = begin_ns
        self.end_ns = max(begin_ns, end_ns)
        self.args = args
        self.tid = 0


class Trace:
    """The events of one process while they are being put together."""

    def __init__(
        self, begin_ns: int, end_ns: int, facts: Mapping[str, Any], thread_names: Mapping[int, str]
    ) -> None:
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self._facts = facts
        self._thread_names = thread_names
        self._names: dict[Row, str] = {}
        self._slices: list[Slice] = []
        self._flows: list[tuple[Slice, Slice]] = []
        self._kernels: dict[int, tuple[list[int], list[str]]] = {}

    # -- putting together --------------------------------------------------------------------------

    def name_row(self, row: Row, name: str) -> None:
        """Say what a row is called."""
        self._names.setdefault(row, name)

    def slice(self, row: Row, name: str, begin_ns: int, end_ns: int, **args: Any) -> Slice:
        """A slice on a row, cut off where the timeline had not begun or had ended."""
        begin_ns = min(max(begin_ns, self.begin_ns), self.end_ns)
        made = Slice(row, name, begin_ns, min(end_ns, self.end_ns), args)
        self._slices.append(made)
        return made

    def arrow(self, source: Slice, target: Slice) -> None:
        """An arrow from where a slice begins to where another one does."""
        self._flows.append((source, target))

    def add_kernels(self, kernels: Sequence[tuple[Any, ...]]) -> None:
        """Slices of kernels: (id, thread, begin, end, what it raised)."""
        for kernel, thread, begin_ns, end_ns, error in sorted(kernels, key=lambda each: each[2]):
            args = {} if error is None else {"raised": error}
            self.slice((THREADS, thread), kernel, begin_ns, end_ns, **args)
            begins, ids = self._kernels.setdefault(thread, ([], []))
            begins.append(begin_ns)
            ids.append(kernel)

    def kernels_in(self, thread: int, begin_ns: int, end_ns: int) -> list[str]:
        """The ids of the kernels that began on a thread in a span of time, each once."""
        begins, ids = self._kernels.get(thread, ([], []))
        first, last = bisect_left(begins, begin_ns), bisect_right(begins, end_ns)
        return list(dict.fromkeys(ids[first:last]))

    # -- writing -----------------------------------------------------------------------------------

    def encode(self, **more: Any) -> bytes:
        """The trace as JSON; `more` is in its metadata."""
        pid = self._facts["pid"]
        rows = self._assign_rows()
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": _process_name(self._facts)}}
        ]
        for tid, name in enumerate(rows, 1):
            events += (
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
                {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}},
            )
        # Row by row in order of time, what holds others before them.
        events += sorted(self._timed(pid), key=lambda e: (e["tid"], e["ts"], -e.get("dur", 0.0)))
        facts = {
            **self._facts,
            "begin_ns": self.begin_ns,
            "begin_unix_ns": self._facts["unix_ns"] + self.begin_ns - self._facts["monotonic_ns"],
            "seconds": (self.end_ns - self.begin_ns) * 1e-9,
            **more,
        }
        return encode_trace(events, {"format": FORMAT, "processes": [facts]})

    def _timed(self, pid: int) -> Iterator[dict[str, Any]]:
        for each in self._slices:
            event: dict[str, Any] = {
                "ph": "X", "cat": each.row[0], "name": each.name, "pid": pid, "tid": each.tid,
                "ts": self._us(each.begin_ns), "dur": (each.end_ns - each.begin_ns) / 1e3,
            }  # fmt: skip
            if each.args:
                event["args"] = each.args
            yield event
        for number, (source, target) in enumerate(self._flows, 1):
            shared = {"cat": "batch", "name": "batch", "id": number, "pid": pid}
            yield {"ph": "s", **shared, "tid": source.tid, "ts": self._us(source.begin_ns)}
            yield {"ph": "f", "bp": "e", **shared, "tid": target.tid, "ts": self._us(target.begin_ns)}

    def _us(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1e3

    def _assign_rows(self) -> list[str]:
        """Give every slice the number of its row; the names of the rows.

        Slices of one row that overlap without one holding the other are on rows of their own.
        """
        by_row: dict[Row, list[Slice]] = {}
        for each in self._slices:
            by_row.setdefault(each.row, []).append(each)
        names: list[str] = []
        for row in sorted(by_row, key=lambda row: _ORDER[row[0]]):  # in order of appearance otherwise
            lanes: list[list[int]] = []  # of each, the ends of the slices that are open
            tids: list[int] = []
            for each in sorted(by_row[row], key=lambda each: (each.begin_ns, -each.end_ns)):
                number = _lane_for(each, lanes)
                if number == len(tids):
                    names.append(self._row_name(row) + (f" ({number + 1})" if number else ""))
                    tids.append(len(names))
                each.tid = tids[number]
        return names

    def _row_name(self, row: Row) -> str:
        kind, about = row
        if kind == THREADS:
            return f"thread {self._thread_names.get(about, about)}"  # type: ignore[call-overload]
        return self._names.get(row, kind)


def _lane_for(each: Slice, lanes: list[list[int]]) -> int:
    """The first row on which a slice is alone or inside another."""
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= each.begin_ns:
            ends.pop()
        if not ends or each.end_ns <= ends[-1]:
            ends.append(each.end_ns)
            return number
    lanes.append([each.end_ns])
    return len(lanes) - 1


def encode_trace(events: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> bytes:
    """The JSON of a trace; its events are first, so that a reader of its head knows what it is."""
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def process_facts() -> dict[str, Any]:
    """Which process this is, and its clocks read at one moment: what traces are put side by side by."""
    return {
        "pid": os.getpid(),
        "rank": own_rank(),
        "host": socket.gethostname(),
        "boot": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None,
        "platform": platform.platform(),
        "monotonic_ns": time.monotonic_ns(),
        "unix_ns": time.time_ns(),
    }


def own_rank() -> int | None:
    """The rank of this process, where it has one: torch.distributed's, else torchrun's."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def _process_name(facts: Mapping[str, Any]) -> str:
    rank = facts["rank"]
    return f"{'' if rank is None else f'rank {rank}, '}pid {facts['pid']} on {facts['host']}"
