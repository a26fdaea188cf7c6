"""What telemetry costs: a call with each kind of it on beside the same call without, and one count alone.

    python benchmarks/telemetry.py --out benchmarks/results/telemetry_cpu.json

Two tables: `calls` (two processes on one core, by turns, as `lz gate` compares paces: microseconds of a call
without, and by how much it takes longer with) and `counts` (nanoseconds of what a decision or a batch counts;
a remembered call counts nothing). Exit status 1 where detailed timing takes more than a twentieth of a call
of 20 us or longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import environment, write

from layerzero.gates.paired_rounds import PacedCall, PaceProcess
from layerzero.observe.counters import Counters
from layerzero.observe.histograms import Histograms
from layerzero.observe.selection_events import SELECTION_SECONDS

CALLS = (
    PacedCall("rms_norm x=16x512:float32 weight=512:float32"),
    PacedCall("linear x=16x512:float32 weight=512x512:float32"),
    PacedCall("attention q=1x8x64x64:float32 k=1x8x64x64:float32 v=1x8x64x64:float32"),
    PacedCall("rms_norm x=1x512:float32 weight=512:float32", callers=64),
)
KINDS = {
    "kernel times": {"LAYERZERO_KERNEL_TIMES": "1"},
    "spans": {"LAYERZERO_SPANS": "1"},
    "timeline": {"LAYERZERO_TIMELINE": "{folder}/trace.json"},
}
MOST, LONG_US = 1.05, 20.0
WARM_BLOCKS = 30


def started(stack: ExitStack, call: PacedCall, variables: dict[str, str], cpu: int) -> PaceProcess:
    """A process whose settings are these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return stack.enter_context(PaceProcess(call, cpu=cpu))
    finally:
        os.environ.clear()
        os.environ.update(before)


def price(call: PacedCall, variables: dict[str, str], rounds: int) -> tuple[float, float]:
    """Microseconds of a call without, and the median of its ratio with over without."""
    cpu = max(os.sched_getaffinity(0))
    with ExitStack() as stack:
        plain = started(stack, call, {}, cpu)
        told = started(stack, call, variables, cpu)
        plain.start()
        told.start()
        told.use_calls_of(plain)
        for _ in range(WARM_BLOCKS):
            plain.block(), told.block()
        ratios, times = [], []
        for number in range(rounds):
            order = (plain, told) if number % 2 else (told, plain)
            took = {id(process): process.block() for process in order}
            ratios.append(took[id(told)] / took[id(plain)])
            times.append(plain.call_us(took[id(plain)]))
    return statistics.median(times), statistics.median(ratios)


def calls(rounds: int, folder: str) -> tuple[list[list[Any]], bool]:
    """Rows: call, its microseconds, then for each kind the microseconds that it adds."""
    found, good = [], True
    for call in CALLS:
        row: list[Any] = [str(call)]
        for name, variables in KINDS.items():
            settings = {key: value.format(folder=folder) for key, value in variables.items()}
            us, ratio = price(call, settings, rounds)
            row += [round(us, 2)] if len(row) == 1 else []
            row += [round(us * (ratio - 1), 2), f"{ratio - 1:.1%}"]
            good = good and (name != "kernel times" or us < LONG_US or ratio <= MOST)
        found.append(row)
    return found, good


def counts() -> list[list[Any]]:
    """Rows: what is counted, nanoseconds at the median."""
    counters, series = Counters(), Histograms().series(SELECTION_SECONDS, op="rms_norm")
    ways: dict[str, Callable[[], object]] = {
        "a counter": lambda: counters.add("selections", op="rms_norm"),
        "the histogram of selections": lambda: series.observe(1e-5),
        "nothing": lambda: None,
    }
    found = []
    for name, count in ways.items():
        took = []
        for _ in range(200):
            begin = time.perf_counter_ns()
            for _ in range(1000):
                count()
            took.append((time.perf_counter_ns() - begin) / 1000)
        found.append([name, round(statistics.median(took), 1)])
    return found


def main() -> int:
    """Run, print, and write where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, good = calls(given.rounds, folder)
    columns = ["call", "us", *(each for name in KINDS for each in (f"{name}: us more", "share"))]
    tables = {
        "calls": {"columns": columns, "rows": rows},
        "counts": {"columns": ["counted", "ns"], "rows": counts()},
    }
    for name, table in tables.items():
        print(name)
        for row in [table["columns"], *table["rows"]]:
            print("  " + " | ".join(str(cell) for cell in row))
    if given.out is not None:
        write(given.out, {"environment": environment(), "tables": tables})
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
