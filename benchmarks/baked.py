"""Decisions made ahead against decisions made when asked: what each costs, cold starts, noise, flips.

    python benchmarks/baked.py --out benchmarks/results/baked_cpu.json

Four parts, each a table in the JSON that it writes: `selection` (microseconds of finding or making a
decision, alone and by four threads; `solver.py` has those of a dispatch table), `cold` (first calls of fresh
processes with and without a warm-up),
`noise` (how many choices change when measurements are disturbed) and `flips` (two tunes of this machine).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import environment, summary, write

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.api.tune import tune_blocking
from layerzero.backends import availability, load_builtin
from layerzero.measure.shapes import standard_calls
from layerzero.ops import table as ops_table
from layerzero.perfdb import Measurement
from layerzero.runtime import Runtime, install, uninstall
from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement
from layerzero.selection.cost.roofline import MEASURED

OPS = ("rms_norm", "linear", "attention")
SPREADS = (0.01, 0.05, 0.1, 0.3, 0.6)
THREADS = 4
PARTS = ("selection", "cold", "noise", "flips")
BAKED = "baked: its plan is there"


# -- what a decision costs --------------------------------------------------------------------------------


def calls_of(count: int) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """Op, signature and arguments of `count` different calls of three ops."""
    made = []
    for n in range(count):
        rows = 1 + n
        x = torch.empty(rows, 256)
        given: dict[str, tuple[Any, ...]] = {
            "rms_norm": (x, torch.empty(256)),
            "linear": (x, torch.empty(512, 256)),
            "attention": tuple(torch.empty(1, 4, rows, 32) for _ in range(3)),
        }
        op = ops_table.get(OPS[n % 3])
        made.append((op, *op.build(*given[op.name])))
    return made


def device(settings: lz.Settings) -> LocalDevice:
    """A device of its own with every kernel of this package, as a runtime would make it."""
    own = LocalDevice("cpu", settings, Registry(load_builtin(), availability))
    if own.workspace_budget.refresh(settings):
        own.refresh()  # a look at memory in the middle would drop what was decided before it
    return own


def decided(own: LocalDevice, calls: list[Any], threads: int) -> list[float]:
    """Microseconds of each call's plan, the calls dealt out to `threads` threads that ask at once."""
    bits, taken = own.mode(), list[float]()
    gate = threading.Barrier(threads)

    def ask(first: int) -> None:
        gate.wait()
        for op, signature, args in calls[first::threads]:
            begin = time.perf_counter_ns()
            own.plan(op, signature, args, bits)
            taken.append((time.perf_counter_ns() - begin) / 1e3)

    running = [threading.Thread(target=ask, args=(first,)) for first in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return taken


def selection(rounds: int, rows: tuple[Measurement, ...]) -> list[list[Any]]:
    """Rows: how the decision came about, threads, microseconds at the median and at p99."""
    calls = calls_of(300)
    plain = lz.Settings(perfdb=None, shipped_tables=False, warm="off")
    found: list[list[Any]] = []
    for threads in (1, THREADS):
        ways: dict[str, Callable[[], LocalDevice]] = {
            "at run time, by estimates": lambda: device(plain),
            "at run time, by measurements": lambda: _measured(plain, rows),
        }
        for name, make in ways.items():
            samples: list[float] = []
            again: list[float] = []
            for _ in range(rounds):
                own = make()
                samples += decided(own, calls, threads)
                if name.endswith("estimates"):
                    again += decided(own, calls, threads)
                own.close()
            found.append([name, threads, *_quantiles(samples)])
            if again:
                found.append([BAKED, threads, *_quantiles(again)])
    return found


def _measured(settings: lz.Settings, rows: tuple[Measurement, ...]) -> LocalDevice:
    own = device(settings)
    kernels = {k.id: k for k in own.registry.all()}
    own.set_costs(MeasuredCosts([SourcedMeasurement(row, MEASURED) for row in rows], kernels, own.hardware))
    return own


def _quantiles(samples: list[float]) -> list[float]:
    numbers = summary(samples)
    return [round(numbers["median"], 2), round(numbers["p99"], 2)]


# -- cold starts ------------------------------------------------------------------------------------------

_COLD = """
import json, time, torch
import layerzero as lz
from layerzero.measure.calls import Call
from layerzero.ops import table
warmed = {warmed}
lz.configure(perfdb=None, shipped_tables=False)
x, w, m = torch.randn(64, 256), torch.randn(256), torch.randn(512, 256)
q = torch.randn(1, 4, 64, 32)
asked = [("rms_norm", (x, w)), ("linear", (x, m)), ("attention", (q, q, q))]
begin = time.perf_counter()
if warmed:
    calls = [Call.of(table.get(name), table.get(name).build(*args)[1]) for name, args in asked]
    report = lz.warmup_blocking(calls)
    assert report.ready, report
took = time.perf_counter() - begin
first = []
for name, args in asked:
    call = getattr(lz.sync, name)
    begin = time.perf_counter_ns()
    call(*args)
    first.append((time.perf_counter_ns() - begin) / 1e3)
print(json.dumps([took * 1e3, *first]))
"""


def cold(processes: int) -> list[list[Any]]:
    """Rows: how a process began, its warm-up in ms, then the first calls of three ops in microseconds."""
    found = []
    for name, warmed in (("cold", False), ("warmed up", True)):
        runs = [_fresh(_COLD.format(warmed=warmed)) for _ in range(processes)]
        found.append([name, *(round(statistics.median(column), 1) for column in zip(*runs, strict=True))])
    return found


def _fresh(code: str) -> list[float]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


# -- noise ------------------------------------------------------------------------------------------------


def noise(rows: tuple[Measurement, ...], rounds: int = 20) -> list[list[Any]]:
    """Rows: spread of the disturbance, choices asked for, share that changed, and what the changed ones cost.

    Every measurement is multiplied by a factor drawn from a log-normal distribution of that spread, its
    variance raised accordingly; the last column is the time of the new choice over that of the undisturbed
    one, by the undisturbed measurements, at the worst.
    """
    from msgspec.structs import replace

    draw = random.Random(18)
    found = []
    for spread in SPREADS:
        asked = changed = 0
        worst = 1.0
        truth = _choices(rows)
        for _ in range(rounds):
            disturbed = tuple(
                replace(r, median_us=r.median_us * (f := draw.lognormvariate(0.0, spread)),
                        variance=(spread * r.median_us * f) ** 2)
                for r in rows
            )  # fmt: skip
            for place, (kernel, _) in _choices(disturbed).items():
                own, known = truth[place]
                asked += 1
                if kernel != own:
                    changed += 1
                    worst = max(worst, known.get(kernel, known[own]) / known[own])
        found.append([f"{spread:.0%}", asked, round(changed / max(asked, 1), 4), round(worst, 3)])
    return found


def _choices(rows: tuple[Measurement, ...]) -> dict[Any, tuple[str, dict[str, float]]]:
    """By measured bucket: who is chosen, and each kernel's microseconds."""
    own = device(lz.Settings(perfdb=None, shipped_tables=False, warm="off"))
    kernels = {k.id: k for k in own.registry.all()}
    costs = MeasuredCosts([SourcedMeasurement(row, MEASURED) for row in rows], kernels, own.hardware)
    own.set_costs(costs)
    found = {}
    for op in OPS:
        for request, times in costs.measured_buckets(op):
            chosen = own.table(ops_table.get(op)).recompute(request).kernel
            where = (op, request.dtype, request.features, tuple(request.dims.items()), request.layout)
            found[where] = (chosen, times)
    own.close()
    return found


# -- main -------------------------------------------------------------------------------------------------


def run(parts: frozenset[str], quick: bool, budget_s: float, processes: int) -> dict[str, Any]:
    """The tables of these parts, on a runtime of its own that keeps nothing."""
    settings = lz.Settings(perfdb=None, shipped_tables=False, warm="off", device="cpu")
    runtime = Runtime(settings)
    install(runtime)
    made: dict[str, tuple[list[str], list[list[Any]]]] = {}
    try:
        repeat = 2 if "flips" in parts else 1
        report = tune_blocking(
            standard_calls(OPS, "cpu", quick), quick=quick, repeat=repeat, budget_s=budget_s
        )
        rows = tuple(r for r in report.rows if r.case.op in OPS)
        if "selection" in parts:
            found = selection(1 if quick else 5, rows)
            made["selection"] = (["decided", "threads", "median us", "p99 us"], found)
        if "cold" in parts:
            columns = ["process", "warm-up ms", *(f"first {op} us" for op in OPS)]
            made["cold"] = (columns, cold(1 if quick else processes))
        if "noise" in parts:
            made["noise"] = (["spread", "choices", "changed", "worst"], noise(rows, 2 if quick else 20))
        if "flips" in parts:
            rate = round(report.flipped / max(report.compared, 1), 4)
            counts = [report.compared, report.flipped, report.flipped_outside, rate]
            made["flips"] = (["calls", "flips", "outside the band", "rate"], [counts])
            named = [[c.call, c.first, c.second, c.outside] for c in report.changes]
            made["flipped"] = (["call", "first winner", "second winner", "outside the band"], named)
    finally:
        uninstall(runtime)
        runtime.close()
    return {name: {"columns": columns, "rows": rows} for name, (columns, rows) in made.items()}


def main() -> int:
    """Run, print, and write where asked; 1 where a baked decision is not the cheaper one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file to write; tables of other parts in it stay")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="just enough to see that everything runs")
    parser.add_argument("--budget-s", type=float, default=25.0, help="seconds of tuning")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables = run(frozenset(given.parts), given.quick, given.budget_s, given.processes)
    for name, table in tables.items():
        print(name)
        for row in [table["columns"], *table["rows"]]:
            print("  " + " | ".join(str(cell) for cell in row))
    if given.out is not None:
        before = json.loads(given.out.read_text()) if given.out.exists() else {"tables": {}}
        write(given.out, {"environment": environment(), "tables": {**before["tables"], **tables}})
    asked = tables.get("selection", {"rows": []})["rows"]
    took = {row[0]: row[2] for row in asked if row[1] == 1}
    baked = took.pop(BAKED, 0.0)
    return int(any(us <= 2 * baked for us in took.values()))


if __name__ == "__main__":
    sys.exit(main())
