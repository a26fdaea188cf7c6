"""`lz capabilities`: what every kernel claims, written to a file, and files of that kind checked."""

from __future__ import annotations

import click

from layerzero.backends import load_builtin
from layerzero.cli.common import output
from layerzero.cli.common.options import json_option
from layerzero.spec.capability_overlays import export, load_overlay, read, write
from layerzero.spec.errors import LayerZeroError
from layerzero.spec.settings import Settings

_PATH = click.argument("path", type=click.Path(dir_okay=False))


@click.group()
def capabilities() -> None:
    """Export what kernels claim; check such files, and overlays that take some of it away."""


@capabilities.command("export")
@_PATH
@json_option
def export_(path: str, json_: bool) -> None:
    """Write every kernel's capability to PATH, with a content hash."""
    document = export(load_builtin(Settings.load().plugins))
    write(path, document)
    plain = {"path": path, "kernels": len(document.kernels), "content": document.content}
    output.show(json_, plain, f"{len(document.kernels)} kernels in {path}, content {document.content[:12]}")


@capabilities.command()
@_PATH
@click.option("--overlay", is_flag=True, help="It is an overlay: some kernels, some fields, narrower.")
@json_option
@click.pass_context
def check(ctx: click.Context, /, path: str, overlay: bool, json_: bool) -> None:
    """Say whether PATH holds; of an overlay, also that it only narrows.

    A file holds that is whole, understood, and unchanged since its hash was made. Exit status 1 where it
    does not.
    """
    try:
        if overlay:
            kernels = {k.id: k for k in load_builtin(Settings.load().plugins)}
            loaded = load_overlay(path, list(kernels.values()))
            narrowed = {name: loaded.apply(kernels[name]).capability.narrowed for name in loaded.changes}
            narrowed_fields = {name: sorted(fields) for name, fields in narrowed.items()}
            count, digest = sum(map(bool, narrowed_fields.values())), loaded.digest
            summary = f"{path} narrows {count} kernels"
        else:
            document = read(path)
            narrowed_fields, digest = {name: [] for name in document.kernels}, document.content
            summary = f"{path} holds: {len(narrowed_fields)} kernels"
    except LayerZeroError as error:
        output.show(json_, {"ok": False, "problem": str(error)}, output.Problem(error))
        ctx.exit(1)
    lines = [f"{name}: {', '.join(fields)}" for name, fields in narrowed_fields.items() if fields]
    plain = {"ok": True, "digest": digest, "kernels": narrowed_fields}
    output.show(json_, plain, f"{summary}, digest {digest[:12]}", *lines)
