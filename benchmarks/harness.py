"""What every benchmark shares: the environment it ran in, interleaved rounds, distributions, tables, JSON.

A number is the median of many short rounds. The arms of a comparison take turns inside each round, in an
order that rotates, so that whatever else the machine does meets all of them alike; a difference between two
arms is taken round by round. Beside wall time stands the thread's CPU time, which neighbours disturb less.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from itertools import repeat
from pathlib import Path
from typing import Any

if __package__:
    from benchmarks.provenance import provenance
else:  # run as a script, beside its neighbours
    from provenance import provenance  # type: ignore[import-not-found, no-redef]

Call = Callable[[], Any]

ROUND_NS = 2_000_000  # about what one arm runs in one round: shorter than a scheduler's time slice


def environment(distributions: Sequence[str] = ()) -> dict[str, Any]:
    """The machine, the versions, the script, its commit, the load: what a reader needs to judge a number."""
    import torch

    load = os.getloadavg() if hasattr(os, "getloadavg") else (float("nan"),) * 3
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(value, 2) for value in load],
        "versions": {name: _version(name) for name in distributions},
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a benchmark may take: rounds of a comparison, single calls, fresh processes.

    `settle_s` is the longest wait for one thing that loads or compiles behind a call.
    """

    rounds: int = 200
    singles: int = 10_000
    processes: int = 7
    round_ns: int = ROUND_NS
    seconds: float = 3.0
    settle_s: float = 300.0

    @classmethod
    def quick(cls) -> Plan:
        """Just enough to see that everything runs."""
        return cls(rounds=3, singles=200, processes=1, round_ns=100_000, seconds=0.2, settle_s=0.0)


SETTLING = 8  # calls after which what is chosen counts as chosen


def settled(plan: Plan, device: Any, selection: Any) -> bool:
    """Whether nothing loads or compiles behind the calls so far, and the last one's `selection` stays.

    Waits for it. A compiler beside a measurement takes a core from it, and its kernel's place after that.
    """
    ended = threading.Event()
    device.loader.run_later(ended.set)
    return not ended.wait(plan.settle_s) or selection.when_warm is None


@dataclass(slots=True)
class Arm:
    """One side of a comparison with its nanoseconds a call, a round each."""

    name: str
    call: Call
    count: int = 1
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def calibrate(self, round_ns: int) -> None:
        """Choose how many calls make a round."""
        for _ in range(20):
            self.call()
        took = min(_timed(self.call, 10)[0] for _ in range(5))
        self.count = max(1, int(round_ns / max(took, 1.0)))

    def run(self) -> None:
        wall, cpu = _timed(self.call, self.count)
        self.wall.append(wall)
        self.cpu.append(cpu)


def _timed(call: Call, count: int) -> tuple[float, float]:
    """Nanoseconds a call: wall, and CPU of this thread."""
    cpu = time.thread_time_ns()
    wall = time.perf_counter_ns()
    for _ in repeat(None, count):
        call()
    wall = time.perf_counter_ns() - wall
    return wall / count, (time.thread_time_ns() - cpu) / count


def interleave(plan: Plan, **calls: Call) -> dict[str, Arm]:
    """Run the calls in turns; the arms by name, with one number a round."""
    arms = {name: Arm(name, call) for name, call in calls.items()}
    for arm in arms.values():
        arm.calibrate(plan.round_ns)
    order = list(arms.values())
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would fall on one arm; what calls allocate is a row of its own
    try:
        for index in range(plan.rounds):
            turn = index % len(order)
            for arm in order[turn:] + order[:turn]:
                arm.run()
    finally:
        if enabled:
            gc.enable()
    return arms


def medians(arms: Mapping[str, Callable[[], float]], rounds: int, scale: float = 1e6) -> dict[str, float]:
    """Each arm's median over `rounds`, times `scale`; all take turns, and a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, seconds in arms.items():
            times[name].append(seconds())
    return {name: round(statistics.median(own[1:]) * scale, 2) for name, own in times.items()}


def device_seconds(run: Call, calls: int = 1) -> float:
    """The GPU's seconds for each of `calls` calls back to back, by CUDA events."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in repeat(None, calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls / 1e3


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, quartiles and p99 of a sample, times `scale`."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered) * scale, 4),
        "p25": round(percentile(ordered, 25) * scale, 4),
        "p75": round(percentile(ordered, 75) * scale, 4),
        "p99": round(percentile(ordered, 99) * scale, 4),
        "n": len(ordered),
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of an ordered sample lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def us(arm: Arm) -> dict[str, dict[str, float]]:
    """An arm's microseconds a call, wall and CPU."""
    return {"wall_us": summary(arm.wall, 1e-3), "cpu_us": summary(arm.cpu, 1e-3)}


def over(arm: Arm, base: Arm) -> dict[str, dict[str, float]]:
    """What `arm` costs beyond `base`, microseconds a call, taken round by round."""
    return {
        "wall_us": summary([a - b for a, b in zip(arm.wall, base.wall, strict=True)], 1e-3),
        "cpu_us": summary([a - b for a, b in zip(arm.cpu, base.cpu, strict=True)], 1e-3),
    }


def singles(call: Call, count: int) -> list[float]:
    """Nanoseconds of each of `count` calls, timed one by one, less what the clock itself costs."""
    clock = time.perf_counter_ns
    empty = statistics.median([-(clock() - clock()) for _ in range(1000)])
    taken: list[float] = []
    for _ in range(count):
        begin = clock()
        call()
        taken.append(max(clock() - begin - empty, 0.0))
    return taken


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Median, p99, p99.9 and worst of single calls in microseconds, and the ratios to the median."""
    ordered = sorted(values)
    median = statistics.median(ordered)
    p99, p999 = percentile(ordered, 99), percentile(ordered, 99.9)
    return {
        "median_us": round(median * 1e-3, 4),
        "p99_us": round(p99 * 1e-3, 4),
        "p999_us": round(p999 * 1e-3, 4),
        "worst_us": round(ordered[-1] * 1e-3, 4),
        "p99_over_median": round(p99 / max(median, 1.0), 3),
        "p999_over_median": round(p999 / max(median, 1.0), 3),
        "n": len(ordered),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=2) + "\n")
    draft.replace(path)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on the terminal; plain columns where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for row in [columns, *rows]:
            print("  ".join(str(cell) for cell in row))
        return
    table = Table(title=title)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
