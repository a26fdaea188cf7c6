"""`lz warmup` and `lz ready`: compile what a deployment needs, and say whether anything is left to do."""

from __future__ import annotations

import click
import msgspec

from layerzero.api.warmup import WarmupReport, readiness_check, warmup_blocking
from layerzero.cli.common import output
from layerzero.cli.common.options import json_option, runtime_of
from layerzero.spec.errors import ConfigurationError
from layerzero.warmup import Manifest, Warmed

manifest_argument = click.argument("manifest", type=click.Path(exists=True))
device_option = click.option("--device", default=None, help="cpu, cuda or cuda:<index>.")


@click.command()
@manifest_argument
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds for the critical calls."
)
@device_option
@json_option
@click.pass_context
def warmup(ctx: click.Context, manifest: str, timeout: float | None, device: str | None, json_: bool) -> None:
    """Make the calls of MANIFEST ready on this machine, so that later processes find everything compiled.

    MANIFEST is what `Manifest.save` wrote, or the folder of a Llama with its config.json. Exit status 1 where
    a critical call failed or was late, or the settings' dispatch table decides nothing here.
    """
    with runtime_of(device, None, False), output.progress("warm-up", json_, _named) as progress:
        report = warmup_blocking(
            read(manifest), device=device, timeout_s=timeout, progress=progress, whole=True
        )
    output.show(
        json_,
        {"ready": report.ready, **msgspec.structs.asdict(report)},
        output.Table(f"warm-up {report.version} on {report.device}", _COLUMNS, _rows(report)),
        f"{len(report.critical) + len(report.others)} calls in {report.seconds:.1f} s",
        f"{report.compiled} compilers started",
        *(output.Problem(f"not ready: {problem}") for problem in report.problems),
    )
    ctx.exit(0 if report.ready else 1)


@click.command()
@manifest_argument
@device_option
@json_option
@click.pass_context
def ready(ctx: click.Context, manifest: str, device: str | None, json_: bool) -> None:
    """Say whether a fresh process would serve MANIFEST without compiling; compiles nothing itself.

    Exit status 0 ready, 1 not ready: for a deployment's gate, after `lz warmup`.
    """
    everything = read(manifest)
    everything = Manifest(critical=everything.calls, name=everything.name)
    with runtime_of(device, None, False):
        report = warmup_blocking(everything, device=device, forbid=True)
        readiness = readiness_check(everything, device=device)
    would = [w for w in report.critical if w.compiled]
    problems = [*readiness.problems, *(f"{w.call}: {w.compiled[0].what} would be started" for w in would)]
    lines: list[str] = [output.Problem(f"not ready: {problem}") for problem in problems]
    output.show(
        json_,
        {"ready": not problems, "problems": problems, "version": report.version},
        *(lines or [f"ready: {len(report.critical)} calls, nothing to compile"]),
    )
    ctx.exit(1 if problems else 0)


def read(path: str) -> Manifest:
    """The manifest in a file, or of the Llama in a folder.

    Raises: click.UsageError: it is neither.
    """
    try:
        return (
            Manifest.load(path)
            if path.endswith(".json") and not _is_config(path)
            else Manifest.of_model(path)
        )
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error


def _is_config(path: str) -> bool:
    return path.endswith("config.json")


_COLUMNS = ("call", "state", "kernel", "seconds", "compiled")


def _rows(report: WarmupReport) -> list[tuple[str, ...]]:
    return [
        (w.call, w.state if not w.error else f"{w.state}: {w.error}", w.kernel, f"{w.seconds:.2f}",
         str(len(w.compiled)))
        for w in (*report.critical, *report.others)
    ]  # fmt: skip


def _named(warmed: Warmed) -> str:
    return warmed.call[:60]
