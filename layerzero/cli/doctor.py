"""`lz doctor` and `lz kernels`: what is here."""

from __future__ import annotations

import click
import msgspec

from layerzero.api.doctor import doctor as examine
from layerzero.api.doctor import unfit
from layerzero.api.inspect import KernelInfo, list_kernels
from layerzero.backends import installed_plugins
from layerzero.cli.common import output
from layerzero.cli.common.options import SecondsRange, json_option, runtime_of, target_options
from layerzero.ops import table as ops_table
from layerzero.runtime import Runtime
from layerzero.spec.capability import Capability


@click.command()
@click.option("--quick", is_flag=True, help="Do not import the optional libraries.")
@click.option(
    "--timeout",
    type=SecondsRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that the import of one library may take.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, quick: bool, timeout: float, json_: bool) -> None:
    """Examine the installation: hardware, torch, libraries, kernels, health, policy.

    Exit status 1 only where a required part is broken; an optional library may be absent.
    """
    report = examine(imports=not quick, timeout_s=timeout)
    output.show(
        json_,
        {"ok": report.ok, **msgspec.structs.asdict(report)},
        *(output.Table(*section) for section in report.sections()),
        *(f"note: {note}" for note in report.notes),
        *(output.Problem(f"problem: {problem}") for problem in report.problems),
        *(["every required part works"] if report.ok else []),
    )
    ctx.exit(0 if report.ok else 1)


@click.command()
@click.option("--op", default=None, help="Only the kernels of one op.")
@click.option("--backend", default=None, help="Only the kernels of one backend.")
@target_options
@json_option
def kernels(
    op: str | None,
    backend: str | None,
    device: str | None,
    policy_file: str | None,
    strict: bool,
    json_: bool,
) -> None:
    """List the kernels and the state of each on a device."""
    if op is not None:
        ops_table.get(op)
    with runtime_of(device, policy_file, strict) as runtime:
        try:
            infos = list_kernels(op, backend=backend)
        except ValueError as error:
            raise click.UsageError(f"--{error}") from error
        notes = {info.id: _note(info, runtime) for info in infos}
        allowed = runtime.settings.plugins
    rows = [
        (i.id, i.op, i.state, "yes" if i.default else "", _takes(i.capability), notes[i.id]) for i in infos
    ]
    # By name: a distribution that adds ops and kernels is allowed once.
    barred = {str(plugin): plugin for plugin in installed_plugins() if plugin.name not in allowed}.values()
    output.show(
        json_,
        [{**msgspec.structs.asdict(info), "note": notes[info.id]} for info in infos],
        output.Table(f"{len(rows)} kernels", ("kernel", "op", "state", "default", "takes", "note"), rows),
        *(f"installed, not allowed: {p}; LAYERZERO_PLUGINS={p.name} lets it run" for p in barred),
    )


def _note(info: KernelInfo, runtime: Runtime) -> str:
    """Why the kernel cannot be taken here whatever it is asked, and what would help."""
    if info.blocked is not None:
        fix = f"; {info.blocked.counterfactual}" if info.blocked.counterfactual else ""
        return f"{info.blocked}{fix}"
    device = runtime.device()
    kernel = device.registry.get(info.id)
    if kernel is None:
        return ""
    place = f"in a process of its own ({kernel.isolated})" if kernel.isolated else ""
    return unfit(kernel, device.hardware) or place


def _takes(capability: Capability) -> str:
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
    dtypes = " ".join(sorted(short.get(dtype, dtype) for dtype in capability.dtypes))
    return f"{'/'.join(sorted(capability.platforms))}, {dtypes}"
