"""`lz explain` and `lz which`: what a call would run on, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import click

from layerzero.api.inspect import MOST_CALLS, complete, dry_run, merged_args
from layerzero.calls.blocking import context_snapshot
from layerzero.cli.common import call_arguments, output
from layerzero.cli.common.options import json_option, runtime_of, target_options
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.runtime import Runtime
from layerzero.selection.record import (
    Candidate,
    Selection,
    empty_selection,
    fold_other_platforms,
    headline,
    rank_candidates,
)
from layerzero.spec.errors import NoKernelFoundError, PolicyValidationError
from layerzero.spec.hardware import Hardware, hypothetical_gpu
from layerzero.spec.reasons import Category, Rejected

# The sides of a call that its caller decides.
CALLERS = frozenset({Category.DTYPE, Category.SHAPE, Category.MEMORY_LAYOUT, Category.FEATURE, Category.MODE})


def call_options(command: Callable[..., None]) -> Callable[..., None]:
    """The op, its arguments, and what decides beside them."""
    for option in (
        click.option(
            "--batch",
            type=click.IntRange(1, MOST_CALLS),
            default=1,
            help="Ask for so many such calls, merged.",
        ),
        click.option(
            "--cuda", default="13.0", show_default=True, help="The CUDA version that goes with --sm."
        ),
        click.option(
            "--sm",
            type=click.IntRange(min=50, max=130),
            help="Imagine an NVIDIA GPU of this compute capability (90: 9.0) with every library installed.",
        ),
        click.option("--backend", default=None, help="Lock the call to a kernel or a backend."),
        target_options,
        click.option(
            "--shape", default=None, help="The tensor for every required argument that is not named."
        ),
        click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]..."),
        click.argument("op"),
    ):
        command = option(command)
    return command


@click.command()
@call_options
@json_option
@click.pass_context
def explain(ctx: click.Context, /, op: str, json_: bool, **options: Any) -> None:
    """Show every kernel's verdict on a call and why one is taken.

    \b
    lz explain attention q=1x32x2048x128:bf16 k=1x8x2048x128:bf16 v=1x8x2048x128:bf16 is_causal=true
    lz explain rms_norm --shape 4096x4096:bf16 --sm 90

    A tensor is SHAPE[:DTYPE][:grad]; nothing is allocated. Exit status 1: no kernel takes the call.
    """
    selection = _select_or_exit(ctx, op, json_, options)
    lines = [headline(selection.request), f"-> {selection.kernel or 'no kernel'}: {selection.why}"]
    if selection.transforms:
        lines.append(f"transforms: {', '.join(map(str, selection.transforms))}")
    if selection.when_warm:
        lines.append(f"chosen when warm: {selection.when_warm}")
    shown, elsewhere = fold_other_platforms(selection)
    rows = [_row(candidate, selection.kernel) for candidate in shown]
    columns = ("kernel", "expected us", "verdict")
    verdicts = output.Table(f"{len(rows)} kernels", columns, rows, selection.kernel)
    output.show(json_, selection.as_plain(), *lines, verdicts, *([elsewhere] if elsewhere else []))


@click.command()
@call_options
@json_option
@click.pass_context
def which(ctx: click.Context, /, op: str, json_: bool, **options: Any) -> None:
    """Print the id of the kernel that a call gets; takes what `explain` takes."""
    selection = _select_or_exit(ctx, op, json_, options)
    plain = {"op": op, "kernel": selection.kernel, "expected_us": round(selection.expected_us, 3)}
    output.show(json_, plain, selection.kernel or "nothing to compute: no kernel runs")


def _select_or_exit(ctx: click.Context, op: str, as_json: bool, options: dict[str, Any]) -> Selection:
    """The selection; where no kernel takes the call, its reasons are printed and the command ends."""
    definition = ops_table.get(op)
    try:
        return select_call(definition, **options)
    except NoKernelFoundError as error:
        refuse(definition, error, as_json)
        ctx.exit(1)


def select_call(
    op: Op,
    *,
    arguments: Sequence[str],
    shape: str | None,
    device: str | None,
    policy_file: str | None,
    strict: bool,
    backend: str | None,
    sm: int | None,
    cuda: str,
    batch: int,
) -> Selection:
    """The selection for a call given in words.

    Raises: NoKernelFoundError: no kernel takes it. click.UsageError: the words, or the arguments they give,
        are wrong.
    """
    if sm is not None and device is not None:
        raise click.UsageError("--sm imagines a GPU: leave --device out")
    if sm is not None and backend is not None:
        raise click.UsageError("--backend locks a call on a device that is here: leave --sm out")
    with runtime_of(device, policy_file, strict) as runtime:
        try:
            _, args = call_arguments.build_call(op, arguments, shape)
            args = merged_args(op, args, batch) if batch > 1 else args
            if sm is not None:
                return _select_imagined(op, args, hypothetical_gpu(sm, cuda=cuda))
            return _select_here(op, args, runtime, backend)
        except (ValueError, TypeError, PolicyValidationError) as error:
            raise click.UsageError(f"{error}\n{call_arguments.usage(op)}") from error


def _select_here(op: Op, args: Args, runtime: Runtime, backend: str | None) -> Selection:
    """The choice on a device that is here, as a call there would get it."""
    device = runtime.device()
    complete(device, op.name)
    table = device.table(op, context_snapshot(device, op.name, backend))
    hardware = device.hardware
    request = table.describe(args, device.mode())
    request = request.replace(platform=hardware.platform, device=str(device.device))
    if op.empty is not None and op.empty(args) is not None:
        return empty_selection(request)
    return table.recompute(request)


def _select_imagined(op: Op, args: Args, hardware: Hardware) -> Selection:
    """The choice on hardware that is not here, as if every kernel's library were installed there."""
    named = dict(zip(inspect.signature(op.build).parameters, args, strict=True))
    return dry_run(op.name, hardware=hardware, **named)


def refuse(op: Op, error: NoKernelFoundError, json_: bool) -> None:
    """Say why no kernel takes the call: every kernel's reasons, and the nearest way to a yes."""
    near = nearest_refusal(error.trace)
    ranked = rank_candidates(error.trace, "")
    plain = {
        "op": op.name, "kernel": None, "error": str(error), "nearest": near,
        "candidates": [
            {"kernel": c.kernel, "reasons": [str(r) for r in c.rejected], "would_take_with": list(cures(c))}
            for c in ranked
        ],
    }  # fmt: skip
    rows = [(c.kernel, " and ".join(cures(c)) or "-", "; ".join(map(str, c.rejected))) for c in ranked]
    refusals = output.Table(f"{len(rows)} kernels refuse", ("kernel", "would take it with", "reasons"), rows)
    title = output.Problem(str(error).partition("\n")[0])
    output.show(json_, plain, title, refusals, *([f"nearest: {near}"] if near is not None else []))


def nearest_refusal(trace: Sequence[Candidate]) -> str | None:
    """The refusal with the fewest reasons that the caller can remove, as one sentence; None if none is."""
    able = [c for c in trace if cures(c)]
    if not able:
        return None
    best = min(able, key=lambda c: (len(c.rejected), c.kernel))
    return f"{best.kernel} would take it with {' and '.join(cures(best))}"


def cures(candidate: Candidate) -> tuple[str, ...]:
    """The changes to the call with which this kernel would take it; empty where changes do not suffice."""
    remedies = [remedy(rejected) for rejected in candidate.rejected]
    return tuple(dict.fromkeys(text for text in remedies if text)) if all(remedies) else ()


def remedy(rejected: Rejected) -> str | None:
    """What a caller could change about the call so that this reason vanishes; None for what is not his."""
    if rejected.counterfactual:
        return rejected.counterfactual
    if rejected.reason.category in CALLERS and rejected.needs:
        return f"{rejected.field} {rejected.needs}"
    return None


def _row(candidate: Candidate, chosen: str) -> tuple[str, str, str]:
    accepted = candidate.accepted
    if not candidate.eligible or accepted is None:
        hints = f" (would take it with {' and '.join(cures(candidate))})" if cures(candidate) else ""
        return (candidate.kernel, "-", "no: " + "; ".join(map(str, candidate.rejected)) + hints)
    parts = ["taken" if candidate.kernel == chosen else "yes", f"by {accepted.source}"]
    if accepted.transforms:
        parts.append(f"+ {accepted.transform_us:.1f} us for {', '.join(map(str, accepted.transforms))}")
    if accepted.note:
        parts.append(f"({accepted.note})")
    return (candidate.kernel, f"{accepted.total_us:.1f}", " ".join(parts))
