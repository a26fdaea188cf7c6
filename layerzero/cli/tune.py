"""`lz tune`, `lz bench`, `lz perfdb` and `lz solve`: measuring kernels, and deciding by what was measured."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from layerzero._util.files import need_own
from layerzero.api.solve import solve as solve_ranges
from layerzero.api.tune import bench_call, tune_blocking, write_shipped_table
from layerzero.cli.common import call_arguments, output
from layerzero.cli.common.options import SecondsRange, device_option, json_option, runtime_of
from layerzero.measure.calls import Call
from layerzero.measure.model_calls import DEFAULT_CONTEXT, DEFAULT_ROWS, ModelConfig, Span, model_calls
from layerzero.measure.tuner import TuningResult
from layerzero.measure.tuning import TuneReport, stored_rows
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import Environment, Launch
from layerzero.perfdb.store import read_rows
from layerzero.selection.cost.cost_model import perfdb_path

_SPAN = re.compile(r"(?P<first>[0-9]{1,9})(?:\.\.(?P<last>[0-9]{1,9}))?")


@click.command()
@click.option("--op", "ops", multiple=True, help="Only this op; repeatable.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="Calls that lz.record() saved.")
@click.option("--quick", is_flag=True, help="Few shapes and samples.")
@click.option("--budget-s", type=SecondsRange(min=1), help="Begin no further call after so many seconds.")
@click.option("--repeat", type=click.IntRange(1, 2), default=1, help="2: measure twice, report flips.")
@click.option("--missing", is_flag=True, help="Only calls that were not measured here before.")
@click.option("--table", type=click.Path(dir_okay=False), help="Write the rows as a table to ship.")
@device_option
@json_option
@click.pass_context
def tune(
    ctx: click.Context, /, ops: tuple[str, ...], trace: str | None, quick: bool, budget_s: float | None,
    repeat: int, missing: bool, table: str | None, device: str | None, json_: bool,
) -> None:  # fmt: skip
    """Measure kernels on this machine, so that choices here rest on measurements from now on."""
    ops_table.need_names(ops)
    if table is not None:
        need_own(Path(table), "rows")
    with runtime_of(device, None, False) as runtime, output.progress("tuning", json_, _named) as progress:
        report = tune_blocking(
            trace, ops=ops or None, quick=quick, budget_s=budget_s, repeat=repeat, missing=missing,
            progress=progress,
        )  # fmt: skip
        if table is not None:
            rows = stored_rows(runtime.device()) if missing else report.rows
            note = f"{len({row.case for row in rows})} sites, {report.skipped} calls left out for time"
            command = " ".join(["lz", *sys.argv[1:]])
            write_shipped_table(rows, runtime.device(), table, command=command, note=note)
    output.show(json_, _plain(report), *_parts_of(report))
    ctx.exit(0 if report.rows else 1)


def _named(tuned: TuningResult | None) -> str:
    return f"{tuned.op}: {tuned.winner or 'none'}" if tuned is not None else "tuning"


def _parts_of(report: TuneReport) -> list[str | output.Table]:
    rows = []
    for tuned in report.tuned:
        best, won = tuned.times_us.get(tuned.best, 0.0), tuned.times_us.get(tuned.winner, 0.0)
        rows.append((tuned.call, tuned.launch, tuned.winner or "none", f"{won:.1f}", f"{best:.1f}"))
    columns = ("call", "launch", "taken", "us", "best us")
    parts: list[str | output.Table] = [
        output.Table(f"{report.calls} calls on {report.device}", columns, rows)
    ]
    wins = Counter(tuned.winner for tuned in report.tuned if tuned.winner)
    parts.append("taken: " + (", ".join(f"{name} {count}" for name, count in wins.most_common()) or "none"))
    parts += [output.Problem(f"not measured: {k}: {why}") for k, why in sorted(report.failures.items())]
    if report.compared:
        parts.append(
            f"two tunes: {report.flipped} of {report.compared} winners differ, "
            f"{report.flipped_outside} of them outside the tie band"
        )
        parts += [
            output.Problem(f"{change.call} ({change.launch}): {change.first}, then {change.second}")
            for change in report.changes
            if change.outside
        ]
    if report.skipped:
        parts.append(f"{report.skipped} calls had no time left")
    return [*parts, f"{len(report.rows)} rows in {report.path or 'memory'}, {report.seconds:.1f} s"]


def _plain(report: TuneReport) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(report)
    for tuned in plain["tuned"]:
        tuned.pop("rows", None)
    return plain | {
        "rows": len(report.rows), "failures": report.failures, "flipped": report.flipped,
        "flipped_outside": report.flipped_outside,
    }  # fmt: skip


@click.command()
@click.argument("op")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--shape", default=None, help="The tensor for every required argument that is not named.")
@click.option("--graph", is_flag=True, help="Replay a CUDA graph: the device's time without the host's.")
@click.option("--baseline", default="", help="The kernel that the speed-up is over; the op's default.")
@click.option("--samples", type=click.IntRange(min=5), default=31, help="Samples a kernel.")
@click.option("--save", is_flag=True, help="Keep the times, as `lz tune` does.")
@device_option
@json_option
def bench(
    op: str, arguments: tuple[str, ...], shape: str | None, graph: bool, baseline: str,
    samples: int, save: bool, device: str | None, json_: bool,
) -> None:  # fmt: skip
    """Time every kernel that takes a call against each other: median, tail, variance, winner, speed-up."""
    definition = ops_table.get(op)
    _, args = call_arguments.build_call(definition, arguments, shape)
    with runtime_of(device, None, False) as runtime:
        try:
            call = Call.of(definition, args)
            launch: Launch = "graph" if graph else "eager"
            comparison = bench_call(
                runtime.device(), call, launch, baseline=baseline, samples=samples, save=save
            )
        except (ValueError, TypeError, RuntimeError) as error:  # torch's, where memory does not suffice
            raise click.UsageError(str(error)) from error
    rows = [
        (c.name, f"{c.median_us:.2f}", f"{c.p95_us:.2f}", f"{c.p99_us:.2f}", f"{c.variance:.3g}",
         f"{c.times_winner:.2f}x", "tied" if c.tied and c.name != comparison.winner else "")
        for c in comparison.contenders
    ]  # fmt: skip
    columns = ("kernel", "median us", "p95", "p99", "variance", "of the winner", "")
    output.show(
        json_,
        msgspec.to_builtins(comparison),
        output.Table(str(call), columns, rows, comparison.winner),
        f"{comparison.winner} wins: {comparison.speedup:.2f}x as fast as {comparison.baseline}",
        *(output.Problem(f"not timed: {kernel}: {why}") for kernel, why in sorted(comparison.failed.items())),
    )


@click.command()
@device_option
@json_option
def perfdb(device: str | None, json_: bool) -> None:
    """Show what was measured on this machine: rows by op, and which of them count here."""
    with runtime_of(device, None, False) as runtime:
        opened = runtime.device()
        path = perfdb_path(opened.settings)
        rows = read_rows(path) if path is not None else []
        own_rows = read_rows(path, Environment.of_hardware(opened.hardware)) if path is not None else []
    counts = Counter(row.case.op for row in rows)
    counted = Counter(row.case.op for row in own_rows)
    size = Path(path).stat().st_size if path is not None and Path(path).exists() else 0
    by_op = {op: {"rows": counts[op], "here": counted[op]} for op in counts}
    table = [(op, str(count), str(counted[op])) for op, count in sorted(counts.items())]
    output.show(
        json_,
        {"path": str(path) if path else None, "bytes": size, "ops": by_op},
        f"{path or 'no file'}: {size / 1e6:.1f} MB",
        output.Table("measurements", ("op", "rows", "of this environment"), table),
    )


class _SpanType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A span of sizes: `1..256`, or one size."""

    name = "FIRST..LAST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        if isinstance(value, tuple):
            return value[0], value[1]
        match = _SPAN.fullmatch(str(value))
        first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (0, 0)
        if not 1 <= first <= last:
            self.fail(f"needs two sizes in order, such as 1..256, got {value!r}", param, ctx)
        return first, last


@click.command()
@click.argument("path", type=click.Path(dir_okay=False))
@click.option("--op", "ops", multiple=True, help="Only this op; repeatable.")
@click.option(
    "--model", type=click.Path(exists=True), help="A config.json: decide a block of that model, too."
)
@click.option(
    "--rows", type=_SpanType(), default=DEFAULT_ROWS, help="Rows decoded at once.  [default: 1..256]"
)
@click.option(
    "--context", type=_SpanType(), default=DEFAULT_CONTEXT, help="Tokens before them.  [default: 128..32768]"
)
@click.option("--tune-s", type=SecondsRange(min=1), help="Measure the model's calls first, so many seconds.")
@device_option
@json_option
def solve(
    path: str, ops: tuple[str, ...], model: str | None, rows: Span, context: Span, tune_s: float | None,
    device: str | None, json_: bool,
) -> None:  # fmt: skip
    """Decide ranges of calls now and write the decisions to PATH, as a dispatch table."""
    ops_table.need_names(ops)
    if tune_s is not None and model is None:
        raise click.UsageError("--tune-s needs the --model whose calls it measures")
    with runtime_of(device, None, False):
        if tune_s is not None and model is not None:
            calls = list(model_calls(ModelConfig.load(model), rows, context))
            tune_blocking(calls, ops=ops or None, device=device, budget_s=tune_s, missing=True)
        table = solve_ranges(path, ops=ops or None, device=device, model=model, rows=rows, context=context)
    wins = Counter((bucket.op, bucket.kernel) for bucket in table.buckets)
    winners = [{"op": op, "kernel": kernel, "buckets": count} for (op, kernel), count in wins.items()]
    lines = [(op, kernel, str(count)) for (op, kernel), count in sorted(wins.items())]
    losses = [
        (op, str(each.calls), f"{each.loss:.2%}", _percent(each.fixed_loss))
        for op, each in sorted(table.held_out.items())
    ]
    plain = {
        "path": path,
        "buckets": len(table.buckets),
        "content": table.content,
        "taken": winners,
        "held_out": msgspec.to_builtins(table.held_out),
    }
    title = "what decisions lose at measured calls that they do not know"
    columns = ("op", "calls", "mean loss", "of one kernel for all")
    output.show(
        json_,
        plain,
        output.Table(f"{len(table.buckets)} ranges in {path}", ("op", "kernel", "ranges"), lines),
        output.Table(title, columns, losses) if losses else "too few measured calls to hold any out: lz tune",
    )


def _percent(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.2%}"
