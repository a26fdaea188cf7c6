"""`lz report` and `lz compare`: one page about a machine, and two such records compared."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from layerzero.cli.common import output
from layerzero.cli.common.options import json_option, runtime_of, target_options
from layerzero.cli.top import DeviceCounts, read_counts
from layerzero.report.collect import as_plain, collect_report
from layerzero.report.compare import ReportComparison, compare_reports
from layerzero.report.document import OpTraffic, ReportDocument, read_report
from layerzero.report.page import page_of_comparison, page_of_report, write_page

_FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.argument("path", required=False, type=click.Path(dir_okay=False))
@click.option(
    "--every-table", is_flag=True, help="All tables that come with the package, of other hardware too."
)
@click.option(
    "--trace", type=_FILE, help="A timeline that lz.timeline or `lz trace` wrote: batches, waits, excerpt."
)
@click.option("--metrics", metavar="URL", help="A running process's metrics: batches and waits.")
@click.option("--since", type=_FILE, help="An earlier report, as page or JSON: what has drifted since.")
@click.option(
    "--rank", "ranks", multiple=True, type=_FILE, help="A rank's report, beside others; repeatable."
)
@click.option("--ledger", type=_FILE, help="A ledger of requirements, such as REQUIREMENTS.md.")
@click.option("--quick", is_flag=True, help="Do not import the optional libraries.")
@target_options
@json_option
def report(
    path: str | None, every_table: bool, trace: str | None, metrics: str | None, since: str | None,
    ranks: tuple[str, ...], ledger: str | None, quick: bool, device: str | None, policy_file: str | None,
    strict: bool, json_: bool,
) -> None:  # fmt: skip
    """Write one HTML page about this machine to PATH, complete in itself: it opens without a network.

    Kernels by call with regret, why each was taken, batches, health, a timeline, drift, ranks, requirements.
    With --json its record is printed, which `lz compare` reads as well as the page.
    """
    if path is None and not json_:
        raise click.UsageError("PATH needs the page to write, such as report.html; --json prints the record")
    with runtime_of(device, policy_file, strict) as runtime:
        traffic = [] if metrics is None else _traffic_of(metrics)
        document = collect_report(
            runtime, every_table=every_table, trace=trace, traffic=traffic, since=since, ranks=ranks,
            ledger=ledger, imports=not quick,
        )  # fmt: skip
        if path is not None:
            write_page(path, page_of_report(document))
    output.show(json_, msgspec.to_builtins(document), *(_summary(path, document) if path is not None else ()))


def _summary(path: str, document: ReportDocument) -> list[str]:
    calls = sum(len(each.calls) for each in document.maps)
    lines = [f"{path}: {Path(path).stat().st_size / 1e6:.2f} MB, {calls} measured calls"]
    if not any(each.is_own and each.calls for each in document.maps):
        lines.append("nothing was measured on this machine: lz tune measures its kernels")
    return lines


def _traffic_of(url: str) -> list[OpTraffic]:
    counts = read_counts(url, "layerzero_")
    return [_traffic_row(url, name, device) for name, device in counts.items() if device.batches]


def _traffic_row(url: str, name: str, device: DeviceCounts) -> OpTraffic:
    """A device's batches by size: the process counts those of at most each bound."""
    below, sizes = 0.0, []
    for bound, total in sorted(device.batch_sizes.items(), key=lambda each: float(each[0])):
        if total > below:
            label = f"up to {float(bound):.0f}" if bound != "+Inf" else "more"
            sizes.append((label, int(total - below)))
        below = total
    batches, calls = int(device.batches), int(device.batched_calls)
    mean_ms, max_ms = device.wait_s / calls * 1e3 if calls else None, device.wait_max_s * 1e3
    return OpTraffic(url, name, batches, calls, tuple(sizes), mean_wait_ms=mean_ms, max_wait_ms=max_ms)


@click.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@click.option("--page", type=click.Path(dir_okay=False), help="Write the comparison as an HTML page, too.")
@click.option("--fail-slower", is_flag=True, help="Exit status 1 where a time is longer by more than noise.")
@json_option
@click.pass_context
def compare(
    ctx: click.Context, first: str, second: str, page: str | None, fail_slower: bool, json_: bool
) -> None:
    """Say what report SECOND differs in from report FIRST, by how much, and why.

    They are of two machines, two versions or two policies.
    """
    comparison = compare_reports(read_report(first), read_report(second))
    if page is not None:
        write_page(page, page_of_comparison(comparison))
    output.show(json_, as_plain(comparison), *_parts_of(comparison))
    ctx.exit(1 if fail_slower and comparison.slower else 0)


def _parts_of(comparison: ReportComparison) -> list[str | output.Table]:
    facts = [(fact.name, fact.first, fact.second) for fact in comparison.facts]
    choices = [(c.op, c.call, c.first, c.second, c.why) for c in comparison.choices]
    ops = [
        (op.op, str(op.calls), f"{op.ratio:.3f}", str(op.faster), str(op.slower), str(op.choices))
        for op in comparison.ops
    ]
    times = [
        (t.op, t.call, t.kernel, f"{t.first_us:g}", f"{t.second_us:g}", f"{t.ratio:.3f}")
        for t in comparison.times
        if t.certain
    ]
    columns = ("op", "call", "kernel", "first us", "second us", "ratio")
    return [
        f"first:  {comparison.first}",
        f"second: {comparison.second}",
        comparison.sentence(),
        output.Table("facts that differ", ("fact", "first", "second"), facts),
        output.Table("by op", ("op", "calls", "second over first", "shorter", "longer", "choices"), ops),
        output.Table("choices that differ", ("op", "call", "first", "second", "why"), choices),
        output.Table("times that differ by more than noise", columns, times[:40]),
    ]  # fmt: skip
