"""`lz consistency`: compare all devices of a deployment, and say what to do where they disagree."""

from __future__ import annotations

from typing import Any

import anyio
import click
import msgspec

from layerzero.cli.common import output
from layerzero.cli.common.options import json_option
from layerzero.cli.deployment import ConsistencyReport, check, load
from layerzero.spec.errors import ConfigurationError, LayerZeroError
from layerzero.spec.settings import Settings


@click.command()
@click.option(
    "--cluster",
    default=None,
    metavar="ADDRESS",
    help="The Ray cluster: an address, auto, or local; this process alone if left out.",
)
@click.option(
    "--deployment",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A YAML file with the calls that matter.",
)
@click.option("--devices", type=click.IntRange(min=1), default=None, help="How many devices to take.")
@json_option
@click.pass_context
def consistency(ctx: click.Context, cluster: str | None, path: str, devices: int | None, json_: bool) -> None:
    """Compare versions, kernels, plans, numerics and batch order over all devices of a deployment.

    \b
    lz consistency --cluster 10.0.0.1:6379 --deployment deployment.yaml
    with   calls:
             - {op: rms_norm, arguments: ["x=64x4096:bf16"]}

    Exit status: 0 all agree, 1 a disagreement or a lost device, 2 the manifest or the cluster is wrong.
    """
    try:
        manifest = load(path)
        report = anyio.run(check, manifest, Settings.load(cluster=cluster, cluster_devices=devices))
    except ConfigurationError:
        raise
    except LayerZeroError as error:
        output.line(f"{type(error).__name__}: {error}", bad=True)
        ctx.exit(1)
    output.show(json_, plain(report), *parts_of(report))
    ctx.exit(0 if report.ok else 1)


def plain(report: ConsistencyReport) -> dict[str, Any]:
    """The report as data."""
    return {
        "ok": report.ok,
        "compared": report.compared,
        "numbers": report.numbers,
        "devices": [
            {"name": d.name, "node": d.node, "hardware": d.hardware.name, "versions": d.versions}
            for d in report.devices
        ],
        "findings": msgspec.to_builtins(report.findings),
    }


def parts_of(report: ConsistencyReport) -> list[str | output.Table]:
    """The report for people: the devices, then what disagrees, value by value."""
    rows = [(d.name, d.node[:12], d.hardware.name, d.versions.get("torch", "-")) for d in report.devices]
    parts: list[str | output.Table] = [output.Table("devices", ("device", "node", "hardware", "torch"), rows)]
    for finding in report.findings:
        parts.append(output.Problem(f"{finding.check}: {finding.about}"))
        parts += [f"  {name}: {value}" for name, value in finding.values.items()]
        parts.append(f"  -> {finding.advice}")
    for kind, calls in report.numbers.items():
        parts.append(output.Table(f"numbers of {kind}", ("call", "compared"), list(calls.items())))
    compared = ", ".join(f"{count} {what}" for what, count in report.compared.items())
    return [
        *parts,
        f"{compared} compared: {'all agree' if report.ok else f'{len(report.findings)} disagree'}",
    ]
