"""Gathers a report: from this process, its device, and the files that a user names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util.log import redact
from layerzero._util.version import VERSION
from layerzero.api.doctor import DoctorReport, doctor
from layerzero.observe.trace import own_rank
from layerzero.observe.trace_files import StoredTrace
from layerzero.perfdb.record import Environment
from layerzero.report.call_maps import map_of_device, map_of_table, tables_for
from layerzero.report.compare import ReportComparison, compare_reports
from layerzero.report.document import OpTraffic, RankFacts, ReportDocument, ReportTable, read_report
from layerzero.report.requirement_rows import read_ledger
from layerzero.report.traffic import excerpt_of, traffic_of_runtime, traffic_of_trace
from layerzero.runtime import Runtime

PathText = str | os.PathLike[str]
MAX_CHANGES = 200


def collect_report(
    runtime: Runtime,
    *,
    every_table: bool = False,
    trace: PathText | None = None,
    traffic: Sequence[OpTraffic] = (),
    since: PathText | None = None,
    ranks: Sequence[PathText] = (),
    ledger: PathText | None = None,
    imports: bool = True,
    timeout_s: float = 60.0,
) -> ReportDocument:
    """The report of this process, its default device and the files named.

    Args: every_table: all tables that come with the package, not only the one that decides here. trace: what
        `lz.timeline` wrote. traffic: more rows of batches. since: an earlier report, whose differences are
        shown. ranks: reports of the ranks of one group. ledger: a ledger of requirements. imports, timeout_s:
        as `doctor`.
    Raises: ReportRefusedError: `since` or one of `ranks` is no report. ConfigurationError: `trace` is no
        trace, `ledger` no ledger. OSError: a file cannot be read.
    """
    stored = None if trace is None else StoredTrace(trace)
    earlier = None if since is None else read_report(since)
    others = [(Path(path).name, read_report(path)) for path in ranks]
    rows = () if ledger is None else read_ledger(ledger)
    examined = doctor(imports=imports, timeout_s=timeout_s)
    device = runtime.device()
    maps = [map_of_device(device)]
    if every_table or runtime.settings.shipped_tables:
        maps += [map_of_table(t, n, runtime.policy) for n, t in tables_for(device.hardware, every_table)]
    written_at = datetime.now(UTC).isoformat(timespec="seconds")
    rank = own_rank()
    host = f"{socket.gethostname()}{'' if rank is None else f', rank {rank}'}"
    document = ReportDocument(
        written_at=written_at,
        version=VERSION,
        title=f"{host}, {examined.device or 'no device'}, layerzero {VERSION}, {written_at}",
        facts=_clean(dict(_facts(examined, runtime))),
        machine=tuple(
            ReportTable(title, columns, tuple(map(_clean_row, rows)))
            for title, columns, rows in examined.sections()
        ),
        missing=tuple(
            (library.backend, library.state, library.detail or library.install)
            for library in examined.libraries
            if library.state not in ("works", "installed")  # the latter is all that is asked without imports
        ),
        problems=examined.problems,
        notes=examined.notes,
        maps=tuple(maps),
        traffic=(*traffic_of_runtime(runtime), *traffic, *(traffic_of_trace(stored) if stored else ())),
        health=tuple((s.kernel, s.state.value, s.why or "-") for s in examined.health),
        timeline=None if stored is None else excerpt_of(stored),
        ranks=tuple(
            RankFacts(name, {**report.facts, "written": report.written_at}) for name, report in others
        ),
        ledger=rows,
    )
    if earlier is None:
        return document
    return msgspec.structs.replace(document, drift=as_plain(compare_reports(earlier, document)))


def as_plain(comparison: ReportComparison) -> dict[str, Any]:
    """A comparison as JSON-ready values; of the times, those that are more than noise, largest first."""
    plain: dict[str, Any] = msgspec.to_builtins(comparison)
    certain = [change for change in plain["times"] if change["certain"]]
    return plain | {
        "sentence": comparison.sentence(),
        "compared": len(plain["times"]),
        "times": certain[:MAX_CHANGES],
    }


def _clean(values: dict[str, Any]) -> dict[str, Any]:
    """The values without secrets: a report is sent around."""
    return dict(redact(None, "report", values))


def _clean_row(row: tuple[str, ...]) -> tuple[str, ...]:
    """A row whose first cell names the others, without secrets."""
    name = row[0]
    (plain_name,) = _clean({"name": name}).values()
    return (str(plain_name), *(str(_clean({name: cell})[name]) for cell in row[1:]))


def _facts(examined: DoctorReport, runtime: Runtime) -> Iterator[tuple[str, str]]:
    """What two machines, versions and policies are compared by."""
    hardware = runtime.device().hardware
    yield "layerzero", VERSION
    yield "system", examined.host.system
    yield "python", examined.host.python.partition(" at ")[0]
    for name, value in msgspec.to_builtins(Environment.of_hardware(hardware)).items():
        yield name, ", ".join(value) if isinstance(value, list | tuple) else str(value)
    yield "policy", runtime.policy.digest
    for library in examined.libraries:
        yield f"library {library.backend}", f"{library.state} {library.version or ''}".strip()
    for rule in examined.policy:
        yield f"rule {rule['action']} {', '.join(rule['patterns'])} for {rule['op']}", str(rule["source"])
    for name, value in examined.settings.items():
        yield f"setting {name}", repr(value)
    for status in examined.health:
        yield f"health {status.kernel}", status.state.value
