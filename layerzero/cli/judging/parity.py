"""`lz parity`: does a model compute on our ops what it computes without them?"""

from __future__ import annotations

from dataclasses import asdict

import click
import msgspec

from layerzero.cli.common import output
from layerzero.cli.common.options import json_option, runtime_of, target_options
from layerzero.gates.model_parity import compare_model

_MARKS = {True: "[x]", False: "[ ]", None: "[-]"}


@click.command()
@click.argument("model")
@target_options
@json_option
@click.pass_context
def parity(
    ctx: click.Context, model: str, device: str | None, policy_file: str | None, strict: bool, json_: bool
) -> None:
    """Compare MODEL, a folder or name of transformers, on our ops with itself in float64, as a checklist.

    A folder without weights gets random ones. Exit status: 0 the checklist holds, 1 it does not, 2 there is
    no such model.
    """
    with runtime_of(device, policy_file, strict) as runtime:
        compared = compare_model(model, runtime.device().device)
    plain = {
        "model": compared.model,
        "passed": compared.passed,
        "checklist": msgspec.to_builtins(compared.checklist),
        "rows": [asdict(row) | {"holds": row.holds} for row in compared.rows],
        "flags": compared.flags,
    }
    rows = [(_MARKS[item.holds], item.what, item.evidence) for item in compared.checklist]
    verdict = f"{compared.model}: {'passed' if compared.passed else 'FAILED'}"
    output.show(
        json_,
        plain,
        output.Table(compared.model, ("", "what", "found"), rows),
        compared.parts,
        verdict if compared.passed else output.Problem(verdict),
    )
    ctx.exit(0 if compared.passed else 1)
