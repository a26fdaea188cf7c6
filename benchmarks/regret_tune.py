"""The tuning of a run of regret: what no table knows first, and a table that keeps what time left out."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.harness import write
from benchmarks.regret_build import in_order
from layerzero.actors.device.local_device import LocalDevice
from layerzero.api.tune import tune_blocking, write_shipped_table
from layerzero.measure.calls import Call
from layerzero.measure.compare import winner_changes
from layerzero.measure.shapes import standard_calls
from layerzero.measure.tuning import TuneReport, missing_calls
from layerzero.perfdb.record import BenchmarkCase, Environment, Measurement
from layerzero.perfdb.shipped import ShippedTable, fitting_tables
from layerzero.perfdb.store import read_rows
from layerzero.selection.cost.cost_model import TABLES


def tune(record: dict[str, Any], device: LocalDevice, options: argparse.Namespace, deadline: float) -> None:
    """Tune the standard shapes while there is time; note how steady winners were, write the table."""
    shipped = [] if options.no_shipped else fitting_tables(device.hardware, TABLES)[:1]
    known = _measured_sites(options.perfdb, device)
    calls = to_tune(device, known, shipped, options.quick, options.first or (), only_missing=options.missing)
    calls = [call for call in calls if not options.only or call.op in options.only]
    if "built" in record:
        calls = in_order(device, calls, record["built"]["units"])
    budget = min(options.tune_budget_s, deadline - time.monotonic())
    report = tune_blocking(calls, budget_s=budget, quick=options.quick, repeat=options.repeat)
    compared, found, rows = report.compared, report.changes, report.rows
    if options.again_s:
        # The order is shuffled: those that there is time for are a fair sample.
        budget = min(options.again_s, deadline - time.monotonic())
        second = tune_blocking(calls[: report.calls], budget_s=budget, quick=options.quick)
        compared, found = winner_changes(report.tuned, second.tuned)
        rows += second.rows
    record["tuning"] = {
        "calls": report.calls, "skipped": report.skipped, "seconds": round(report.seconds, 1),
        "rows": len(rows), "compared": compared, "flipped": len(found),
        "flipped_outside_band": sum(change.outside for change in found), "third_tunes": report.thirds,
        "failures": report.failures, "changes": [msgspec.to_builtins(change) for change in found],
    }  # fmt: skip
    print(json.dumps(record["tuning"], indent=1), flush=True)
    write(options.out, record)
    if options.table is not None:
        if options.perfdb is not None:
            rows = tuple(read_rows(options.perfdb, Environment.of_hardware(device.hardware)))
        _write_table(rows, shipped, device, options, report)


def to_tune(
    device: LocalDevice,
    known: set[BenchmarkCase],
    shipped: Sequence[ShippedTable],
    quick: bool,
    first: Sequence[str] = (),
    *,
    only_missing: bool = False,
) -> list[Call]:
    """The standard calls that are not `known`: those the shipped table misses, then those of ops `first`.

    A call is missing where the table has no row of it, or none of a kernel that came later. Where time ends,
    what was left out has an older measurement at least.
    """
    calls = standard_calls(None, device.device.type, quick)
    rows = [row for table in shipped for row in table.rows]
    missing = set(map(str, missing_calls(device, calls, rows)))
    left = [call for call in calls if call.benchmark_case(device.hardware) not in known]
    left.sort(key=lambda call: (str(call) not in missing, call.op not in first))
    return [call for call in left if str(call) in missing or not only_missing]


def _write_table(
    rows: Sequence[Measurement],
    shipped: Sequence[ShippedTable],
    device: LocalDevice,
    options: argparse.Namespace,
    report: TuneReport,
) -> None:
    kept = to_keep(rows, shipped, Environment.of_hardware(device.hardware))
    sites, older = {row.case for row in rows}, {row.case for row in kept}
    note = f"{len(sites)} sites, {report.skipped} calls left out for time"
    if kept:
        note += f"; {len(older - sites)} sites of an earlier run in this environment"
    if both := sites & older:
        note += f", and its rows of kernels that this run did not have at {len(both)} sites"
    command = "python -m benchmarks.regret --tune --table"
    write_shipped_table([*rows, *kept], device, options.table, command=command, note=note)


def to_keep(
    rows: Sequence[Measurement], shipped: Sequence[ShippedTable], here: Environment
) -> list[Measurement]:
    """The rows of shipped tables of this very environment that were not measured again: other calls, and
    other kernels at the same calls."""
    fresh = {(row.case, row.kernel) for row in rows}
    same = [table for table in shipped if table.provenance.environment == here]
    return [row for table in same for row in table.rows if (row.case, row.kernel) not in fresh]


def _measured_sites(perfdb: str | None, device: LocalDevice) -> set[BenchmarkCase]:
    """What an earlier run of this benchmark has tuned already."""
    if perfdb is None:
        return set()
    return {row.case for row in read_rows(perfdb, Environment.of_hardware(device.hardware))}
