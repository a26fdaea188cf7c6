"""`lz warmup` and `lz ready`: compile what a deployment needs, and say whether anything is left to do."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from layerzero.api.warmup import WarmupReport, load_bundle, readiness_check, save_bundle, warmup_blocking
from layerzero.cli.common import output
from layerzero.cli.common.options import SecondsRange, device_option, json_option, runtime_of
from layerzero.runtime.bundles import BundleReport
from layerzero.spec.errors import BundleRefusedError
from layerzero.warmup import Manifest, WarmedCall

manifest_argument = click.argument("manifest", type=click.Path(exists=True))


@click.command()
@click.argument("manifest", type=click.Path(exists=True), required=False)
@click.option("--timeout", type=SecondsRange(min=0, min_open=True), help="Seconds for the critical calls.")
@click.option(
    "--bundle", type=click.Path(dir_okay=False), help="Write what is warm then into this file, for others."
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False),
    help="Load this bundle first, whose code will run here; its calls are warmed where MANIFEST is left out.",
)
@click.option("--sha256", help="The digest that the bundle of --from needs to have.")
@click.option("--replace", is_flag=True, help="Let --from overwrite files that are here and differ.")
@device_option
@json_option
@click.pass_context
def warmup(
    ctx: click.Context,
    manifest: str | None,
    timeout: float | None,
    bundle: str | None,
    source: str | None,
    sha256: str | None,
    replace: bool,
    device: str | None,
    json_: bool,
) -> None:
    """Make the calls of MANIFEST ready on this machine, so that later processes find everything compiled.

    MANIFEST is what `Manifest.save` wrote, or the folder of a Llama with its config.json. --bundle writes
    compiled kernels, capture proofs, measurements and the dispatch table of this environment into one file;
    --from reads it on a machine like this one. Exit status 1 where a critical call failed or was late, the
    bundle is refused, or the settings' dispatch table decides nothing here.
    """
    if manifest is None and source is None:
        raise click.UsageError("Missing argument 'MANIFEST'; only --from has calls of its own.")
    if source is None and (sha256 is not None or replace):
        raise click.UsageError(f"{'--sha256' if sha256 is not None else '--replace'} needs --from")
    loaded = saved = None
    with runtime_of(device, None, False):
        if source is not None:
            loaded = _load(source, sha256, device, replace)
        calls = read(manifest) if manifest is not None else loaded.manifest if loaded is not None else None
        calls = calls or Manifest(critical=())
        with output.progress("warm-up", json_, _named) as progress:
            report = warmup_blocking(calls, device=device, timeout_s=timeout, progress=progress, whole=True)
        if bundle is not None:
            saved = save_bundle(bundle, calls, device=device)
    output.show(
        json_,
        {"ready": report.ready, **msgspec.structs.asdict(report), "bundle": loaded, "saved": saved},
        *(_lines_of(loaded) if loaded is not None else ()),
        output.Table(f"warm-up {report.version} on {report.device}", _COLUMNS, _rows(report)),
        f"{len(report.critical) + len(report.others)} calls in {report.seconds:.1f} s",
        f"{report.compiled} compilers started",
        *([f"wrote {saved.path}: {saved.members} files, sha256 {saved.sha256}"] if saved is not None else []),
        *(output.Problem(f"not ready: {problem}") for problem in report.problems),
    )
    ctx.exit(0 if report.ready else 1)


def _lines_of(loaded: BundleReport) -> Iterator[str]:
    yield f"loaded {loaded}"
    yield from (f"note: {note}" for note in loaded.notes)
    yield from (f"kept, though it differs: {path}" for path in loaded.unchanged)
    yield from (f"replaced: {path}" for path in loaded.replaced)


def _load(path: str, sha256: str | None, device: str | None, replace: bool) -> BundleReport:
    """The bundle's report. Raises: click.UsageError: the digest is none. ClickException: it is refused."""
    try:
        return load_bundle(path, sha256=sha256, device=device, replace=replace)
    except ValueError as error:
        raise click.UsageError(f"--{error}") from error
    except BundleRefusedError as error:
        reasons = "".join(f"\n  {problem}" for problem in error.problems)
        raise click.ClickException(f"{path} is refused, and nothing was written:{reasons}") from error


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
    plain = {"ready": not problems, "problems": problems, "version": report.version}
    lines: list[str] = [output.Problem(f"not ready: {problem}") for problem in problems]
    output.show(json_, plain, *(lines or [f"ready: {len(report.critical)} calls, nothing to compile"]))
    ctx.exit(1 if problems else 0)


def read(path: str) -> Manifest:
    """The manifest in a file, or of the Llama in a folder.

    Raises: ConfigurationError: it is neither.
    """
    is_manifest = path.endswith(".json") and not path.endswith("config.json")
    return Manifest.load(path) if is_manifest else Manifest.of_model(path)


_COLUMNS = ("call", "state", "kernel", "seconds", "compiled")


def _rows(report: WarmupReport) -> list[tuple[str, ...]]:
    return [
        (w.call, w.state if not w.error else f"{w.state}: {w.error}", w.kernel, f"{w.seconds:.2f}",
         str(len(w.compiled)))
        for w in (*report.critical, *report.others)
    ]  # fmt: skip


def _named(warmed: WarmedCall) -> str:
    return warmed.call[:60]
