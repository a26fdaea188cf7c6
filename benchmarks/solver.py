"""What decisions made ahead are worth, and what they cost: held-out loss, and microseconds beside deciding.

    python benchmarks/solver.py --latencies ../shared/perf_tables --out benchmarks/results/solver.json

Four parts, each a table of the JSON that it writes: `published` (a tree over latencies that others published,
three engines for each shape, every shape held out once), `shipped` (the tables of this package solved on
their machines as prices know them), `decisions` (what a table's decision and deciding take, in one run, the
arms by turns) and `cold` (first calls of fresh processes). Exit status 1 where a tree loses more than 1 % on
the mean, or more than the best fixed choice, or a table's decision costs more than deciding.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import environment, summary, write

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.api.solve import solve
from layerzero.api.tune import tune_blocking
from layerzero.backends import availability, load_builtin
from layerzero.measure.calls import Call
from layerzero.measure.shapes import attention, linear, norm
from layerzero.measure.solving import solve_op
from layerzero.observe.counters import Counters
from layerzero.ops import table as ops_table
from layerzero.perfdb import Measurement
from layerzero.perfdb.shipped import ShippedTable, read_table
from layerzero.runtime import Runtime, install, uninstall
from layerzero.selection.context import SelectionContext
from layerzero.selection.cost.cost_model import TABLES
from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement
from layerzero.selection.cost.roofline import MEASURED, SHIPPED
from layerzero.selection.dispatch import PlanTable
from layerzero.selection.dispatch_table import DispatchTable
from layerzero.selection.solver.families import grid_points
from layerzero.selection.solver.ranges import Entry, compile_lookup
from layerzero.selection.solver.tree import Samples, choices, collapse, fit, folds_of, leaves_of
from layerzero.spec.hardware import Hardware, hypothetical_gpu, probe

PARTS = ("published", "shipped", "decisions", "cold")
ENGINES = ("vllm", "sglang", "trtllm")
AXES = ("B", "Hq", "Hk", "G", "D", "Sk", "window", "fp8 cache")
FILES = {"decode": "h200_attention_generation.csv.gz", "prefill": "h200_attention_context.csv.gz"}
FOLDS = 5
MOST_LOST = 0.01


# -- latencies that others published ----------------------------------------------------------------------


def samples_of(path: Path) -> Samples:
    """One row a shape, in the axes of our calls; context is what is there before and with the step."""
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))
    sizes, costs = [], []
    for row in rows:
        heads, kv_heads = int(row["num_heads"]), int(row["num_key_value_heads"])
        sizes.append([
            int(row["batch_size"]), heads, kv_heads, heads // kv_heads, int(row["head_dim"]),
            int(row["isl"]) + int(row["step"]), int(row["window_size"]), int("8" in row["kv_cache_dtype"]),
        ])  # fmt: skip
        costs.append([1e3 * float(row[f"{engine}_ms"]) for engine in ENGINES])
    return Samples(AXES, ENGINES, np.array(sizes, dtype=np.int64), np.array(costs))


def published(folder: Path) -> tuple[list[list[Any]], bool]:
    """Rows: phase, shapes, leaves, mean and p99 loss held out, best fixed choice's, groups, seconds, ns.

    Groups are those of one head size, cache type and window: in how many a fixed choice would lose less.
    """
    found, good = [], True
    for phase, name in FILES.items():
        samples = samples_of(folder / name)
        losses, fold = samples.losses(), folds_of(samples, FOLDS)
        lost = np.empty(len(losses))
        seconds, leaves = [], []
        for number in range(FOLDS):
            held = fold == number
            begin = time.perf_counter()
            fitted = fit(samples.take(~held))
            seconds.append(time.perf_counter() - begin)
            leaves.append(fitted.leaves)
            lost[held] = losses[held, choices(fitted.root, samples.sizes[held])]
        fixed = losses.mean(axis=0)
        groups = [AXES.index(axis) for axis in ("D", "window", "fp8 cache")]
        _, members = np.unique(samples.sizes[:, groups], axis=0, return_inverse=True)
        worse = sum(
            lost[members == g].mean() > losses[members == g].mean(axis=0).min()
            for g in range(members.max() + 1)
        )
        best = ENGINES[int(fixed.argmin())]
        found.append([
            phase, len(lost), int(statistics.median(leaves)), round(float(lost.mean()), 5),
            round(float(np.quantile(lost, 0.99)), 4), best, round(float(fixed.min()), 5),
            int(members.max()) + 1, int(worse), round(statistics.median(seconds), 2), lookup_ns(samples),
        ])  # fmt: skip
        good = good and (phase != "decode" or lost.mean() <= MOST_LOST) and lost.mean() <= fixed.min()
    return found, good


def lookup_ns(samples: Samples) -> float:
    """Nanoseconds of one look-up in the whole tree, compiled, at the median of shapes."""
    root = collapse(fit(samples).root)
    bounds = list(zip(samples.sizes.min(axis=0).tolist(), samples.sizes.max(axis=0).tolist(), strict=True))
    entries = [
        Entry({axis: (int(a), int(b)) for axis, (a, b) in zip(AXES, box, strict=True)}, ENGINES[leaf.choice])
        for leaf, box in leaves_of(root, bounds)
    ]
    look_up = compile_lookup(entries)
    shapes = [dict(zip(AXES, map(int, sizes), strict=True)) for sizes in samples.sizes[::37]]
    took = []
    for shape in shapes:
        begin = time.perf_counter_ns()
        for _ in range(50):
            look_up(shape)
        took.append((time.perf_counter_ns() - begin) / 50)
    return round(statistics.median(took), 1)


# -- the tables of this package ---------------------------------------------------------------------------


class ImaginedDevice:
    """The machine that a shipped table is of, as far as prices and capabilities know it."""

    def __init__(self, table: ShippedTable) -> None:
        self.settings = lz.Settings()
        self.hardware: Hardware = hardware_of(table)
        self.kernels = {kernel.id: kernel for kernel in load_builtin()}
        rows = [SourcedMeasurement(row, SHIPPED) for row in table.rows]
        self.costs = MeasuredCosts(rows, self.kernels, self.hardware)
        self.counters = Counters()

    def table(self, op: Any) -> PlanTable:
        """A table that decides and never plans."""
        own = tuple(kernel for kernel in self.kernels.values() if kernel.op == op.name)
        context = SelectionContext(own, self.hardware)
        return PlanTable(op, context, lambda op, selection: None, version=1, max_keys=1, cost=self.costs)  # type: ignore[arg-type, return-value]

    def warm(self, kernel_ids: Any, request: Any = None) -> None:
        """Nothing can be loaded for a machine that is not here."""


def hardware_of(table: ShippedTable) -> Hardware:
    """The machine of a table: its roofs and multiprocessors; a CPU's are those of the one at hand."""
    import msgspec

    there = table.provenance.environment
    if there.sm is None:
        return probe("cpu")
    return msgspec.structs.replace(hypothetical_gpu(there.sm), threads=there.threads)


def shipped(names: Iterable[str]) -> list[list[Any]]:
    """Rows: table, op, ranges, measured calls held out, mean loss, that of the best kernel, seconds."""
    found = []
    for name in names:
        table = read_table(TABLES / name)
        device: Any = ImaginedDevice(table)
        for op in sorted({row.case.op for row in table.rows}):
            begin = time.perf_counter()
            solved = solve_op(device, ops_table.get(op))
            took = time.perf_counter() - begin
            if (held := solved.held_out) is not None:
                found.append(
                    [name, op, len(solved.buckets), held.calls, held.loss, held.fixed_loss, round(took, 1)]
                )
    return found


# -- what a decision costs --------------------------------------------------------------------------------

OPS = ("rms_norm", "linear", "attention")
PLAIN = {"perfdb": None, "shipped_tables": False, "warm": "off", "device": "cpu"}


def ends() -> list[Call]:
    """The calls that are measured: the ends of the sizes that are asked for, and some between."""
    made = []
    for rows in (1, 8, 64, 512):
        made += [norm("rms_norm", rows, 256, "float32"), linear(rows, 256, 512, "float32")]
        made.append(attention(1, 4, 4, rows, rows, 32, "float32", causal=False))
    return made


def asked() -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """Op, signature and arguments of calls that each have a key of their own, few of them measured."""
    made = []
    for number, rows in enumerate(np.repeat(grid_points(1, 512), len(OPS)).tolist()):
        x = torch.empty(rows, 256)
        given: dict[str, tuple[Any, ...]] = {
            "rms_norm": (x, torch.empty(256)),
            "linear": (x, torch.empty(512, 256)),
            "attention": tuple(torch.empty(1, 4, rows, 32) for _ in range(3)),
        }
        op = ops_table.get(OPS[number % len(OPS)])
        made.append((op, *op.build(*given[op.name])))
    return made


def decisions(rounds: int, path: Path, rows: tuple[Measurement, ...]) -> tuple[list[list[Any]], bool]:
    """Rows: how it is decided, microseconds at the median and at p99, of calls that are new, by turns."""
    plain = lz.Settings(**PLAIN)  # type: ignore[arg-type]
    calls = asked()
    named = sorted({bucket.kernel for bucket in DispatchTable.load(path).buckets})

    def device(settings: lz.Settings) -> LocalDevice:
        own = LocalDevice("cpu", settings, Registry(load_builtin(), availability))
        own.warm(named)  # what is cold is not taken yet, however it is decided
        if own.workspace_budget.refresh(settings):
            own.refresh()
        return own

    def measured() -> LocalDevice:
        own = device(plain)
        kernels = {kernel.id: kernel for kernel in own.registry.all()}
        sourced = [SourcedMeasurement(row, MEASURED) for row in rows]
        own.set_costs(MeasuredCosts(sourced, kernels, own.hardware))
        return own

    ways: dict[str, Callable[[], LocalDevice]] = {
        "decided by estimates": lambda: device(plain),
        "decided by measurements": measured,
        "from the dispatch table": lambda: device(plain.replace(dispatch_table=str(path))),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    ahead = 0
    for number in range(rounds):
        opened = {name: make() for name, make in ways.items()}
        order = [*ways][number % 3 :] + [*ways][: number % 3]
        for op, signature, args in calls:
            for name in order:
                own = opened[name]
                begin = time.perf_counter_ns()
                plan = own.plan(op, signature, args, own.mode())
                taken[name].append((time.perf_counter_ns() - begin) / 1e3)
                ahead += plan.selection.ahead
        for own in opened.values():
            own.close()
    found = []
    for name, samples in taken.items():
        numbers = summary(samples)
        found.append([name, len(samples), round(numbers["median"], 2), round(numbers["p99"], 2)])
    medians = [row[2] for row in found]
    if ahead != rounds * len(calls):
        raise RuntimeError(f"every call needs to be in the table, got {ahead} of {rounds * len(calls)}")
    return found, medians[2] < min(medians[:2])


_COLD = """
import json, time, torch
import layerzero as lz
lz.configure(perfdb=None, shipped_tables=False, device="cpu", dispatch_table={table!r})
x, w, m = torch.randn(64, 256), torch.randn(256), torch.randn(512, 256)
q = torch.randn(1, 4, 64, 32)
first = []
for name, args in (("rms_norm", (x, w)), ("linear", (x, m)), ("attention", (q, q, q))):
    begin = time.perf_counter_ns()
    getattr(lz.sync, name)(*args)
    first.append((time.perf_counter_ns() - begin) / 1e6)
print(json.dumps(first))
"""


def cold(processes: int, path: Path) -> list[list[Any]]:
    """Rows: how a fresh process decides, milliseconds of its first calls of three ops, processes by turns.

    Modules are compiled beforehand, as they are where the package was installed.
    """
    ways = {"decided at the call": None, "from the dispatch table": str(path)}
    runs: dict[str, list[list[float]]] = {name: [] for name in ways}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(path.parent / "bytecode")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in range(processes + 1):
        for name, table in ways.items():
            code = _COLD.format(table=table)
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
            )
            if number:  # the first one of each compiles
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    return [
        [name, processes, *(round(statistics.median(column), 2) for column in zip(*rows, strict=True))]
        for name, rows in runs.items()
    ]


# -- main -------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The tables of the parts, and whether every bound holds."""
    made: dict[str, tuple[list[str], list[list[Any]]]] = {}
    good = True
    if "published" in given.parts:
        rows, good = published(given.latencies)
        made["published"] = (
            ["phase", "shapes", "leaves", "mean loss", "p99 loss", "best fixed", "its mean loss", "groups",
             "groups where fixed loses less", "seconds", "look-up ns"], rows,
        )  # fmt: skip
    if "shipped" in given.parts:
        columns = ["table", "op", "ranges", "calls held out", "mean loss", "best fixed", "seconds"]
        made["shipped"] = (columns, shipped(given.tables))
    if {"decisions", "cold"} & set(given.parts):
        runtime = Runtime(lz.Settings(**PLAIN))  # type: ignore[arg-type]
        runtime.started = True
        install(runtime)
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "dispatch_table.json"
                report = tune_blocking(ends(), quick=True)
                solve(path, ops=OPS)
                if "decisions" in given.parts:
                    rows, cheaper = decisions(2 if given.quick else 40, path, report.rows)
                    made["decisions"], good = (
                        (["decided", "calls", "median us", "p99 us"], rows),
                        good and cheaper,
                    )
                if "cold" in given.parts:
                    columns = ["first call", "processes", *(f"{op} ms" for op in OPS)]
                    made["cold"] = (columns, cold(1 if given.quick else given.processes, path))
        finally:
            uninstall(runtime)
            runtime.close()
    return {name: {"columns": columns, "rows": rows} for name, (columns, rows) in made.items()}, good


def main() -> int:
    """Run, print, and write where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--latencies", type=Path, default=Path("../shared/perf_tables"))
    parser.add_argument("--tables", nargs="+", default=["cpu_amd_avx2.json", "cuda_h200.json"])
    parser.add_argument("--out", type=Path, help="file to write; tables of other parts in it stay")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="just enough to see that everything runs")
    parser.add_argument("--processes", type=int, default=9, help="fresh processes of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables, good = run(given)
    for name, table in tables.items():
        print(name)
        for row in [table["columns"], *table["rows"]]:
            print("  " + " | ".join(str(cell) for cell in row))
    if given.out is not None:
        before = json.loads(given.out.read_text()) if given.out.exists() else {"tables": {}}
        write(given.out, {"environment": environment(), "tables": {**before["tables"], **tables}})
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
