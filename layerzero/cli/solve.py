"""`lz solve`: ranges of calls decided ahead, into a dispatch table."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import click
import msgspec

from layerzero.api.solve import solve as solve_ranges
from layerzero.api.tune import tune_blocking
from layerzero.cli.common import output
from layerzero.cli.common.options import json_option, op_named, runtime_of
from layerzero.cli.tune import device_option
from layerzero.measure.model_calls import DEFAULT_CONTEXT, DEFAULT_ROWS, ModelConfig, Span, model_calls
from layerzero.spec.errors import LayerZeroError

_SPAN = re.compile(r"(?P<first>[0-9]{1,9})(?:\.\.(?P<last>[0-9]{1,9}))?")


class _SpanType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A span of sizes: `1..256`, or one size."""

    name = "FIRST..LAST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        """The two ends."""
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
@click.option(
    "--tune-s", type=click.FloatRange(min=1), help="Measure the model's calls first, so many seconds."
)
@device_option
@json_option
def solve(
    path: str, ops: tuple[str, ...], model: str | None, rows: Span, context: Span, tune_s: float | None,
    device: str | None, json_: bool,
) -> None:  # fmt: skip
    """Decide ranges of calls now and write the decisions to PATH, as a dispatch table."""
    for name in ops:
        op_named(name)
    if tune_s is not None and model is None:
        raise click.UsageError("--tune-s needs the --model whose calls it measures")
    with runtime_of(device, None, False):
        try:
            if tune_s is not None and model is not None:
                calls = list(model_calls(ModelConfig.load(model), rows, context))
                tune_blocking(calls, ops=ops or None, device=device, budget_s=tune_s, missing=True)
            table = solve_ranges(
                path, ops=ops or None, device=device, model=model, rows=rows, context=context
            )
        except LayerZeroError as error:
            raise click.UsageError(str(error)) from error
    wins = Counter((bucket.op, bucket.kernel) for bucket in table.buckets)
    winners = [{"op": op, "kernel": kernel, "buckets": count} for (op, kernel), count in wins.items()]
    lines = [(op, kernel, str(count)) for (op, kernel), count in sorted(wins.items())]
    losses = [
        (
            op,
            str(losses.calls),
            f"{losses.loss:.2%}",
            "none" if losses.fixed_loss is None else f"{losses.fixed_loss:.2%}",
        )
        for op, losses in sorted(table.held_out.items())
    ]
    held_out = msgspec.to_builtins(table.held_out)
    plain = {"path": path, "buckets": len(table.buckets), "content": table.content, "taken": winners}
    parts: list[str | output.Table] = [
        output.Table(f"{len(table.buckets)} ranges in {path}", ("op", "kernel", "ranges"), lines)
    ]
    if losses:
        columns = ("op", "calls", "mean loss", "of one kernel for all")
        parts.append(
            output.Table("what decisions lose at measured calls that they do not know", columns, losses)
        )
    else:
        parts.append("too few measured calls to hold any out: lz tune")
    output.show(json_, plain | {"held_out": held_out}, *parts)
