"""`lz gate`: may this be released?"""

from __future__ import annotations

from pathlib import Path

import click

from layerzero.cli.common import output
from layerzero.cli.common.options import json_option, runtime_of, target_options
from layerzero.gates import baseline as baselines
from layerzero.gates.outcome import GateReport
from layerzero.gates.release_file import PerformanceStage, Release, read_release
from layerzero.gates.run import run_gate
from layerzero.perfdb.record import Environment
from layerzero.spec.errors import ConfigurationError

_STATUS = {"passed": 0, "failed": 1, "undecided": 3}


@click.command()
@click.argument("release", type=click.Path(exists=True, dir_okay=False), metavar="RELEASE.yaml")
@click.option(
    "--suite", default="full", show_default=True, help="quick, full, stress, or one of the file's own."
)
@click.option("--quick", is_flag=True, help="The same as --suite quick.")
@click.option(
    "--artifacts", type=click.Path(file_okay=False), help="Keep the report and what it rests on there."
)
@click.option(
    "--write-baseline", type=click.Path(dir_okay=False), help="Measure the calls, and judge nothing."
)
@target_options
@json_option
@click.pass_context
def gate(
    ctx: click.Context, /, release: str, suite: str, quick: bool, artifacts: str | None,
    write_baseline: str | None, device: str | None, policy_file: str | None, strict: bool, json_: bool,
) -> None:  # fmt: skip
    """Run the stages of RELEASE.yaml and say whether all hold, but for what its waivers excuse.

    Exit status: 0 all hold, 1 something does not, 2 the file or the command line is wrong, or a baseline
    cannot be written on a machine that is busy, 3 nothing failed, but the time of a call cannot be
    separated from noise.
    """
    file = read_release(release)
    with runtime_of(device, policy_file, strict) as runtime:
        if write_baseline is not None:
            environment = Environment.of_hardware(runtime.device().hardware)
            _write_baseline(file, write_baseline, environment, str(runtime.device().device))
            return
        report = run_gate(
            file, "quick" if quick else suite, runtime, artifacts=artifacts,
            begun=lambda stage: None if json_ else click.echo(f"{stage} ...", err=True),
        )  # fmt: skip
    output.show(json_, report.as_plain(), *_parts_of(report))
    ctx.exit(_STATUS[report.verdict])


def _write_baseline(file: Release, path: str, environment: Environment, device: str) -> None:
    """Measure the calls of the performance stage, and say how the file is named in a release.

    Raises: ConfigurationError: there is no such stage, or it names no calls. BaselineRefusedError: the
        machine is too busy for one.
    """
    stage = file.stages.get("performance")
    if not isinstance(stage, PerformanceStage) or not stage.calls:
        raise ConfigurationError("--write-baseline needs calls in the stage performance, got none")
    baseline = baselines.measure_baseline(stage.paced_calls, environment, rounds=stage.rounds, device=device)
    digest = baselines.write_baseline(path, baseline)
    rows = [
        (str(p.call), f"{p.ratio.median:.3f}", f"{p.control.median:.3f}", f"{p.load:g}")
        for p in baseline.paced
    ]
    output.table(path, ("call", "over torch", "torch over a product", "load"), rows)
    output.line(f"baseline: {Path(path).name}\nsha256: {digest}")


def _parts_of(report: GateReport) -> list[str | output.Table]:
    """The report for people: a row a stage, then what was found."""
    rows = [(s.stage, s.state, str(s.checks), f"{s.seconds:.1f}") for s in report.stages]
    findings = [finding for stage in report.stages for finding in stage.findings]
    word = report.verdict if report.verdict == "passed" else report.verdict.upper()
    verdict = f"{report.title}: {word}"
    return [
        output.Table(report.machine, ("stage", "state", "checks", "s"), rows),
        *(f"{each.stage}: compared with {each.beside}" for each in report.stages if each.beside),
        *(f"waived: {each.name}: {each.text} ({each.waived_by})" for each in findings if not each.fails),
        *(f"note: {note}" for note in report.notes),
        *(output.Problem(f"{each.name}: {each.text}") for each in findings if each.fails),
        verdict if word == "passed" else output.Problem(verdict),
    ]
