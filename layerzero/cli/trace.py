"""`lz trace`: a timeline of a program, of several ranks in one, and what a trace says in numbers."""

from __future__ import annotations

import runpy
import sys
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import click
import msgspec

from layerzero._util.files import need_own, replace_own
from layerzero.api.timeline import timeline
from layerzero.cli.common import output
from layerzero.cli.common.options import json_option
from layerzero.observe.timeline import FIELD, MAX_EVENTS, MIN_EVENTS
from layerzero.observe.trace_files import StoredTrace, merge_traces, summarize
from layerzero.spec.errors import ConfigurationError

output_option = click.option(
    "-o", "--output", "path", required=True, type=click.Path(dir_okay=False), help="The trace to write."
)


@click.group()
def trace() -> None:
    """Record what ran when, for whom and why then, as a trace that Perfetto opens (ui.perfetto.dev)."""


@trace.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, name="run"
)
@output_option
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as for `python -m`.")
@click.option("--kernels/--no-kernels", default=True, help="Also each kernel by itself.")
@click.option("--nvtx", is_flag=True, help="Mark batches and kernels as NVTX ranges, where CUDA is there.")
@click.option(
    "--max-events", type=click.IntRange(min=MIN_EVENTS), default=MAX_EVENTS, show_default=True,
    help="Keep the newest so many events.",
)  # fmt: skip
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_program(
    path: str,
    module: bool,
    kernels: bool,
    nvtx: bool,
    max_events: int,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a Python PROGRAM, and write the trace however it ends."""
    if not module and not Path(program).is_file():
        raise click.UsageError(f"PROGRAM needs the path of a Python file, got {program!r}; -m runs a module")
    sys.path.insert(0, "" if module else str(Path(program).resolve().parent))
    if module and not _is_module(program):
        raise click.UsageError(f"PROGRAM needs a module, got {program!r}, which is not installed here")
    sys.argv = [program, *arguments]
    try:
        recording = timeline(path, kernels=kernels, nvtx=nvtx or None, max_events=max_events)
        recording.start()
    except ConfigurationError as error:
        raise click.UsageError(f"--output: {error}") from error
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except Exception:  # the program's, not this command's
        traceback.print_exc()
        sys.exit(1)
    finally:
        recording.stop()
        recording.save()
        click.echo(f"trace: {recording.path}", err=True)


def _is_module(name: str) -> bool:
    with suppress(ImportError, ValueError):  # of a package that is not there, of a name that is none
        return find_spec(name) is not None
    return False


@trace.command()
@output_option
@click.argument("paths", nargs=-1, required=True, type=click.Path(dir_okay=False), metavar="TRACE...")
def merge(path: str, paths: tuple[str, ...]) -> None:
    """Make one trace of those of several ranks, a process each.

    Processes of one boot of one machine are aligned by its monotonic clock, others by the time of day.
    """
    need_own(Path(path), FIELD)
    replace_own(Path(path), merge_traces(paths), FIELD)
    output.line(f"{len(paths)} traces in {path}")


@trace.command()
@click.argument("path", type=click.Path(dir_okay=False))
@json_option
def show(path: str, json_: bool) -> None:
    """Say what a trace holds: batches by op, and what took longest."""
    summary = summarize(StoredTrace(path))
    dropped, unfinished = summary.dropped_events, summary.unfinished_batches
    rows = [
        (each.op, str(each.batches), f"{each.callers:.1f}", f"{each.rows:.1f}", f"{each.ms:.3f}",
         ", ".join(f"{why} {count}" for why, count in each.whys.items()), ", ".join(each.kernels))
        for each in summary.batches
    ]  # fmt: skip
    timed = [(each.where, each.name, str(each.runs), f"{each.ms:.3f}") for each in summary.longest]
    output.show(
        json_,
        msgspec.to_builtins(summary),
        f"{path}: {summary.processes} processes, {summary.seconds:.3f} s",
        *([output.Problem(f"{dropped} older events were dropped")] if dropped else []),
        *([output.Problem(f"{unfinished} batches had not ended")] if unfinished else []),
        output.Table("batches", ("op", "batches", "callers", "rows", "ms", "why then", "kernels"), rows),
        output.Table("longest in all", ("on", "what", "runs", "ms"), timed),
    )
