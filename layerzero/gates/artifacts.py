"""What a release keeps of itself, in one folder: claims, decisions, measurements, trace, environment."""

from __future__ import annotations

import hashlib
import inspect
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import msgspec

from layerzero._util.files import pretty_json, put_whole
from layerzero.api.doctor import doctor
from layerzero.api.solve import solve
from layerzero.api.timeline import timeline
from layerzero.backends import load_builtin
from layerzero.calls.awaited import awaitable
from layerzero.measure.calls import Call
from layerzero.measure.shapes import standard_calls
from layerzero.ops import table as ops_table
from layerzero.perfdb.rows import connect
from layerzero.runtime import Runtime
from layerzero.selection.active_table import activate
from layerzero.selection.cost.cost_model import perfdb_path
from layerzero.spec.capability_overlays import export, write
from layerzero.spec.errors import ConfigurationError, NoKernelFoundError

CAPABILITIES, TABLE, VALIDATION = "capabilities.json", "dispatch_table.json", "dispatch_table.validation.json"
SNAPSHOT, SELECTIONS, TRACE, MATRIX = "perfdb.sqlite", "selections.jsonl", "trace.json", "environment.json"
_TRACED_CALLERS = 8


def write_artifacts(runtime: Runtime, folder: Path) -> list[str]:
    """Write all of them; the notes say which could not be, and why.

    Raises: OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes: list[str] = []
    write(folder / CAPABILITIES, export(load_builtin(runtime.settings.plugins)))
    put_whole(folder / MATRIX, pretty_json(doctor(imports=False)))
    _write_decisions(runtime, folder, notes)
    _snapshot(runtime, folder / SNAPSHOT, notes)
    calls = standard_calls(None, runtime.device().hardware.platform, quick=True)
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in _selections(runtime, calls))
    put_whole(folder / SELECTIONS, lines)
    with timeline(folder / TRACE):
        anyio.run(_run_together, next(call for call in calls if call.op == "rms_norm"))
    return notes


def digests(folder: Path) -> tuple[tuple[str, str], ...]:
    """Every file of a folder with its SHA-256."""
    return tuple(
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
        if path.is_file()
    )


def _write_decisions(runtime: Runtime, folder: Path, notes: list[str]) -> None:
    """The dispatch table of what was measured, and whether it would be taken here."""
    device = runtime.device()
    try:
        table = solve(folder / TABLE)
    except ConfigurationError as error:
        notes.append(f"{TABLE}: {error}")
        return
    active = activate(folder / TABLE, device.hardware, device.registry.of, strict=False)
    refusal = active.refusal or active.problem(runtime.policy)
    verdict = {"ok": not refusal, "problem": refusal, "buckets": len(table.buckets), "content": table.content}
    put_whole(folder / VALIDATION, pretty_json(verdict))


def _snapshot(runtime: Runtime, path: Path, notes: list[str]) -> None:
    """A copy of the measurements as SQLite itself makes one, while others may write."""
    source = perfdb_path(runtime.device().settings)
    if source is None or not source.is_file():
        notes.append(f"{path.name}: nothing was measured on this machine")
        return
    path.unlink(missing_ok=True)
    with closing(connect(source, "ro")) as reader, closing(sqlite3.connect(path)) as copy:
        reader.backup(copy)


def _selections(runtime: Runtime, calls: tuple[Call, ...]) -> Iterator[dict[str, object]]:
    """The whole record of each choice, as `lz explain` gives it."""
    device = runtime.device()
    for call in calls:
        table = device.table(ops_table.get(call.op))
        try:
            selection = table.recompute(call.request(device.hardware))
        except NoKernelFoundError as error:
            yield {"call": str(call), "kernel": None, "error": str(error).partition("\n")[0]}
        else:
            yield {"call": str(call), **selection.as_plain()}


async def _run_together(call: Call) -> None:
    """A few callers that await the same op: a batch in the trace."""
    op = ops_table.get(call.op)
    function = awaitable(op)
    named = dict(zip(inspect.signature(op.build).parameters, call.make(), strict=True))
    async with anyio.create_task_group() as group:
        for _ in range(_TRACED_CALLERS):
            group.start_soon(partial(function, **named))
