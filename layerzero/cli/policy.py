"""`lz policy check FILE`: is a policy file valid, and does all that it names exist."""

from __future__ import annotations

import click

from layerzero.backends import load_builtin
from layerzero.cli.common import output
from layerzero.cli.common.options import json_option
from layerzero.ops import table as ops_table
from layerzero.selection.policy import load_policy
from layerzero.selection.policy.policy import describe
from layerzero.spec.errors import PolicyLoadError
from layerzero.spec.settings import Settings


@click.group()
def policy() -> None:
    """Work with policy files."""


@policy.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--strict", is_flag=True, help="A name that is unknown here is an error, as in strict mode.")
@json_option
@click.pass_context
def check(ctx: click.Context, file: str, strict: bool, json_: bool) -> None:
    """Check a policy file; an error names the file and the line.

    A rule that names nothing known here is a warning: the file may be meant for another machine.
    """
    try:
        loaded = load_policy(
            file,
            known_ops=frozenset(ops_table.names()),
            known_kernels=frozenset(kernel.id for kernel in load_builtin(Settings.load().plugins)),
            strict=strict,
        )
    except PolicyLoadError as error:
        plain = {"ok": False, "path": error.path, "line": error.line, "error": str(error)}
        output.show(json_, plain, output.Problem(error))
        ctx.exit(1)
    rules = loaded.policy.rules
    rows = [
        (r.source, r.effect, ", ".join(r.patterns), r.target, " and ".join(map(str, r.when)), r.note)
        for r in rules
    ]
    warnings = [{"source": w.rule.source, "message": w.message} for w in loaded.findings]
    output.show(
        json_,
        {
            "ok": True, "digest": loaded.policy.digest, "rules": describe(loaded.policy),
            "warnings": warnings,
        },
        output.Table(f"{len(rows)} rules", ("from", "action", "kernels", "op", "when", "note"), rows),
        *(f"warning: {w['source']}: {w['message']}" for w in warnings),
        f"{file}: valid",
    )  # fmt: skip
