"""What would be chosen now on the shapes of a record of regret, judged by the times that the record holds.

Run `python -m benchmarks.regret_replay RECORD --table TABLE`: no kernel runs, so a table and a way of pricing
can be judged on a machine without the hardware. `--worst 10` shows the worst shapes with every kernel's
price, where the price comes from, and its time; `--without-own` leaves out what was measured at the shape.
`--leave-one-out` adds the table's own calls, each chosen as if its bucket had not been measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import write
from benchmarks.regret_blind import seen
from benchmarks.regret_shapes import shapes
from layerzero.backends import load_builtin
from layerzero.measure.calls import Call
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import BenchmarkCase, Launch, Measurement, implausible_reason
from layerzero.perfdb.shipped import ShippedTable, read_table
from layerzero.selection.context import CostModel, SelectionContext
from layerzero.selection.cost.measured import (
    MeasuredCosts,
    SourcedMeasurement,
    bucket_of,
    request_of,
)
from layerzero.selection.cost.roofline import SHIPPED
from layerzero.selection.decide import decide
from layerzero.selection.key import KeyBuilder
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.hardware import Hardware, hypothetical_gpu, probe
from layerzero.spec.kernel import Kernel

LEFT_OUT = "left out"
BLIND_ONCE = "blind once"


class Case(msgspec.Struct, frozen=True):
    """One row of a record: its call as a request, and the microseconds of every kernel that it may choose."""

    name: str
    group: str
    launch: str
    part: str
    request: CallSpec
    times: dict[str, float]

    @property
    def site(self) -> BenchmarkCase:
        """Where a measurement of this very call would stand."""
        return BenchmarkCase.of_request(self.request)


@functools.cache
def _seen(platform: str) -> frozenset[str]:
    return frozenset(str(call) for _, call in seen(platform))


def _part(row: Mapping[str, Any], call: Call, hardware: Hardware) -> str:
    """The part of a row as it counts today; records of the first version know tuned and held out alone."""
    if str(call) in _seen(hardware.platform):
        return BLIND_ONCE  # choices were changed since, in view of that record
    return str(row["part"]) if "part" in row else "tuned" if row["tuned"] else "held out"


Judged = tuple[float, Case, Selection]  # the chosen kernel's time over the best one's, and how it came about


def cases(record: Mapping[str, Any], calls: Iterable[Call], hardware: Hardware) -> list[Case]:
    """The rows that can be chosen for again: those of listed calls that more than one kernel takes."""
    known = {str(call): call for call in calls}
    found = []
    for name, row in record["shapes"].items():
        call = known.get(name.partition(" ")[2])
        if call is None or "choice" not in row:
            continue
        request = call.request(hardware)
        if row["launch"] == "graph":
            request = request.replace(modes=request.modes | {"capture"})
        barred = row.get("faster_but_not_admitted", {})
        times = {k: us for k, us in row["kernels_us"].items() if k not in barred}
        if len(times) > 1:
            found.append(Case(name, row["group"], row["launch"], _part(row, call, hardware), request, times))
    return found


def choose(case: Case, kernels: Mapping[str, Kernel], hardware: Hardware, cost: CostModel) -> Selection:
    """The decision among the kernels that the record timed.

    Raises: NoKernelFoundError: none of them is known here, or none takes the call.
    """
    op = ops_table.get(case.request.op)
    own = [kernels[k] for k in case.times if k in kernels]
    priced = KeyBuilder(op, own, ()).bucket(case.request)
    eager = case.request.replace(modes=case.request.modes - {"capture"})

    def price(kernel: Kernel, work: WorkEstimate, asked: CallSpec, there: Hardware) -> tuple[float, str]:
        # What may be captured was settled when the record was made: the times are of those kernels alone.
        return cost(kernel, work, asked.replace(modes=case.request.modes), there)

    return decide(
        op, eager, SelectionContext(tuple(own), hardware),
        bucketed=priced.replace(modes=eager.modes), cost=price,
    )  # fmt: skip


def hardware_of(table: ShippedTable) -> Hardware:
    """The machine that a table is of, as far as prices know it: its roofs and its multiprocessors."""
    there = table.provenance.environment
    if there.sm is None:
        return probe("cpu")
    return msgspec.structs.replace(hypothetical_gpu(there.sm), threads=there.threads)


def main() -> None:
    """Choose again for every shape and print the figures, worst shapes last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--worst", type=int, default=0, help="show so many of the worst shapes")
    parser.add_argument("--without-own", action="store_true", help="as if the shape itself were not measured")
    parser.add_argument("--out", type=Path, help="write the figures there")
    parser.add_argument("--leave-one-out", action="store_true", help="judge the table's own calls, too")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    table = read_table(options.table)
    hardware, rows = hardware_of(table), table.rows
    kernels = {kernel.id: kernel for kernel in load_builtin()}
    listed = [shape.call for shape in shapes(hardware.platform)]
    judged: list[Judged] = left_out(rows, kernels, hardware) if options.leave_one_out else []
    model = model_of(rows, kernels, hardware)
    for case in cases(record, listed, hardware):
        if options.without_own:
            model = model_of([row for row in rows if row.case != case.site], kernels, hardware)
        try:
            selection = choose(case, kernels, hardware, model)
        except NoKernelFoundError as error:
            print(f"{case.name}: {str(error)[:200]}")
            continue
        # What this hardware cannot run, or nobody registers any more, is not available.
        best = min(case.times[c.kernel] for c in selection.trace if c.eligible)
        judged.append((case.times[selection.kernel] / best, case, selection))
    figures = show(judged, options.worst)
    if options.out is not None:
        found = {
            "what": "choices of the model as it is now over times that a run recorded;"
            " no kernel ran for this",
            "record": options.record.name, "table": options.table.name, "measured": record["environment"],
            "choice": figures,
        }  # fmt: skip
        write(options.out, found)


def model_of(rows: Iterable[Measurement], kernels: Mapping[str, Kernel], hardware: Hardware) -> MeasuredCosts:
    """Prices out of a table's rows."""
    return MeasuredCosts([SourcedMeasurement(row, SHIPPED) for row in rows], kernels, hardware)


def left_out(rows: Sequence[Measurement], kernels: Mapping[str, Kernel], hardware: Hardware) -> list[Judged]:
    """The choice for every call of a table as if its bucket had not been measured, over the best there.

    A kernel's time is its measurement, and beside it what transforms are priced at, which tables leave out.
    """
    measured: dict[tuple[BenchmarkCase, Launch], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    ops: dict[str, list[Measurement]] = defaultdict(list)
    for row in rows:
        ops[row.case.op].append(row)
        if row.kernel in kernels and not implausible_reason(row):
            measured[row.case, row.launch][row.kernel].append(row.median_us)
    found: list[Judged] = []
    apart, model = None, model_of((), kernels, hardware)
    for site, launch in sorted(measured, key=lambda known: str((bucket_of(known[0]), known))):
        request = request_of(site, hardware)
        if launch == "graph":
            request = request.replace(modes=frozenset({"capture"}))
        times = {k: statistics.geometric_mean(us) for k, us in measured[site, launch].items()}
        name = f"{launch} {site.op} {dict(site.dims)} {site.features}"
        case = Case(name, site.op, launch, LEFT_OUT, request, times)
        if len(times) < 2:
            continue
        bucket = bucket_of(site)
        if bucket != apart:
            others = [row for row in ops[site.op] if bucket_of(row.case) != bucket]
            apart, model = bucket, model_of(others, kernels, hardware)
        selection = choose(case, kernels, hardware, model)
        whole = {
            c.kernel: case.times[c.kernel] + c.accepted.transform_us
            for c in selection.trace
            if c.eligible and c.accepted is not None
        }
        found.append((whole[selection.kernel] / min(whole.values()), case, selection))
    return found


def part_of(case: Case) -> str:
    """What a case is reported under: how it was launched, and what its shape proves."""
    return f"{case.launch}, {case.part}"


def show(judged: list[Judged], worst: int) -> dict[str, dict[str, float]]:
    """Means by launch and part, printed and returned, then the worst shapes with every kernel's price."""
    parts: dict[str, list[float]] = defaultdict(list)
    for choice, case, _ in judged:
        parts[part_of(case)].append(choice)
    figures = {}
    for name, found in sorted(parts.items()):
        mean = statistics.geometric_mean(found)
        figures[name] = {"shapes": len(found), "geomean": round(mean, 4), "worst": round(max(found), 4)}
        print(f"{name}: {len(found)} shapes, choice {mean:.4f}, worst {max(found):.3f}")
    for choice, case, selection in sorted(judged, key=lambda each: -each[0])[:worst]:
        print(f"{choice:.3f} {part_of(case)} {case.name}: {selection.why}")
        for kernel in sorted(case.times, key=case.times.__getitem__):
            accepted = next((c.accepted for c in selection.trace if c.kernel == kernel), None)
            if accepted is not None:
                mark = " <- chosen" if kernel == selection.kernel else ""
                price = f"priced {accepted.total_us:10.1f} by {accepted.source}"
                print(f"    {case.times[kernel]:10.1f} us, {price} {kernel}{mark}")
    return figures


if __name__ == "__main__":
    main()
