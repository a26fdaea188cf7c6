"""What a soak's processes hold, second after second, and whether it grows.

A value that goes up and down with every restart says nothing by a single sample.
So the second half of the run is cut into windows, the least value of each is its floor, and the median slope
between all pairs of floors (Theil and Sen's) says what is never given back.
Cycles are collected some times a window: Python itself looks at the oldest ones every few minutes at best.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import tracemalloc
from array import array
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

MARK = "LZ_SOAK"  # in the environment of every process of this soak, and of those that they leave
WINDOWS = 8
OWN_S, OTHERS_S = 1.0, 10.0  # between two looks
COLLECTIONS = 2  # of cycles in each window
TOP, SHOWN = 10, 60
# Growth of the floor over the second half: what is allowed in all, and beyond that each minute.
BOUNDS = {
    "rss_mib": (6.0, 0.5),
    "traced_kib": (300.0, 40.0),
    "python_blocks": (4000.0, 500.0),
    "files": (3.0, 0.1),
    "threads": (3.0, 0.1),
    "tasks": (3.0, 0.1),
    "processes": (2.0, 0.05),
    "shared_segments": (2.0, 0.05),
}


def _read(pid: int | str, name: str) -> bytes:
    """A file of a process; nothing where that has ended. No Path: each would leave its parts interned."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def marked() -> list[int]:
    """The processes of this soak, those whose parents died too; not this one."""
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
    return [pid for pid in others if wanted in _read(pid, "environ").split(b"\0")]


def segments(pids: Sequence[int]) -> set[bytes]:
    """The pieces of shared memory that the processes have mapped, by device and inode."""
    lines = (line for pid in pids for line in _read(pid, "maps").splitlines())
    return {b" ".join(line.split()[3:5]) for line in lines if b"/memfd:" in line or b"/dev/shm/" in line}


def resident_mib(pid: int | str = "self") -> float:
    """A process's resident memory."""
    return int(_read(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def own() -> dict[str, float]:
    """What this process holds now; called on its loop."""
    return {
        "rss_mib": round(resident_mib(), 2),
        "traced_kib": round(tracemalloc.get_traced_memory()[0] / 1024, 1),
        "python_blocks": float(sys.getallocatedblocks()),
        "files": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(threading.active_count()),
        "tasks": float(len(asyncio.all_tasks())),
    }


def others() -> dict[str, float]:
    """What this process and those that it has started hold together; takes a while."""
    pids = marked()
    return {"processes": float(len(pids)), "shared_segments": float(len(segments([os.getpid(), *pids])))}


def floors(
    times: Sequence[float], values: Sequence[float], windows: int = WINDOWS
) -> list[tuple[float, float]]:
    """(middle, least value) of each window of the second half."""
    begin, end = times[0] + (times[-1] - times[0]) / 2, times[-1]
    width = (end - begin) / windows or 1.0
    lows: list[tuple[float, float]] = []
    for index in range(windows):
        low, high = begin + index * width, begin + (index + 1) * width
        last = index == windows - 1
        inside = [v for t, v in zip(times, values, strict=True) if low <= t < high or (last and t == end)]
        if inside:
            lows.append((low + width / 2, min(inside)))
    return lows


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between all pairs of points; 0 for fewer than two."""
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
    return median(slopes) if slopes else 0.0


def trends(
    times: Sequence[float], values: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float | bool]]:
    """For each value with a bound: its slope, its growth over the second half, and whether that is flat."""
    minutes = (times[-1] - times[0]) / 120
    found: dict[str, dict[str, float | bool]] = {}
    for name, (in_all, a_minute) in BOUNDS.items():
        per_s = slope(floors(times, values[name]))
        growth = per_s * 60 * minutes
        found[name] = {
            "slope a minute": round(per_s * 60, 4),
            "growth of the second half": round(growth, 3),
            "allowed": round(in_all + a_minute * minutes, 3),
            "flat": growth <= in_all + a_minute * minutes,
        }
    return found


def traced() -> dict[str, int]:
    """Bytes that Python holds, by file and line."""
    taken = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    )
    return {f"{s.traceback[0].filename}:{s.traceback[0].lineno}": s.size for s in taken.statistics("lineno")}


class Watch:
    """Looks until it is stopped; at half time and at the end, where Python's memory is."""

    def __init__(self, began_s: float, seconds: float) -> None:
        self.times = array("d")
        self.values = {name: array("d") for name in BOUNDS}  # eight bytes a look: no growth of its own
        self.load = array("d")  # of the machine, by all that runs there
        self._began_s, self._seconds = began_s, seconds
        self._half: dict[str, int] = {}

    async def run(self) -> None:
        """Look at this process every second and at the others every few, for ever."""
        loop = asyncio.get_running_loop()
        seen, due = await asyncio.to_thread(others), 0.0
        collect = every = self._seconds / (2 * WINDOWS * COLLECTIONS)
        while True:
            now = loop.time() - self._began_s
            if now > collect:
                gc.collect()
                collect = now + every
            if not self._half and now > self._seconds * 0.45:
                self._half = await asyncio.to_thread(traced)
            if now > due:
                seen, due = await asyncio.to_thread(others), now + OTHERS_S
            self.times.append(loop.time() - self._began_s)
            for name, value in (own() | seen).items():
                self.values[name].append(value)
            self.load.append(os.getloadavg()[0])
            await asyncio.sleep(OWN_S)

    def last(self) -> dict[str, float]:
        """What was seen last."""
        return {name: values[-1] for name, values in self.values.items() if values}

    def record(self) -> dict[str, Any]:
        """The trends, the largest growths by line since shortly before half time, and some of the looks."""
        after = traced()
        grown = sorted(((after[at] - self._half.get(at, 0), at) for at in after), reverse=True)[:TOP]
        short = str(Path(__file__).resolve().parents[2]) + "/"
        step = max(1, len(self.times) // SHOWN)
        return {
            "trends": trends(self.times, self.values),
            "bytes grown by line": {at.replace(short, ""): size for size, at in grown},
            "looks": len(self.times),
            "seconds": [round(t, 1) for t in self.times[::step]],
            "values": {name: list(values[::step]) for name, values in self.values.items()},
            "load of the machine": [round(load, 1) for load in self.load[::step]],
        }
