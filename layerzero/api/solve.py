"""Deciding ahead: `solve` writes a dispatch table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from layerzero._util.files import need_own
from layerzero.calls.blocking import context_runtime
from layerzero.measure.model_calls import DEFAULT_CONTEXT, DEFAULT_ROWS, ModelConfig, Span, model_calls
from layerzero.measure.solving import solve_op
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import Environment
from layerzero.perfdb.table_file import content_hash
from layerzero.selection.cost.measured import MeasuredCosts
from layerzero.selection.dispatch_table import Bucket, DispatchTable, HeldOutResult, limits_of
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError


def solve(
    path: str | os.PathLike[str],
    *,
    ops: Sequence[str] | None = None,
    device: str | None = None,
    model: str | os.PathLike[str] | None = None,
    rows: Span = DEFAULT_ROWS,
    context: Span = DEFAULT_CONTEXT,
) -> DispatchTable:
    """Decide ranges of calls now and write the decisions as a dispatch table.

    A runtime opened with `Settings(dispatch_table=path)` takes them from there. Decided are the calls that
    were measured here or in a shipped table, with the sizes between them and an octave around. `model` names
    a config.json of transformers: the calls of one of its blocks are decided, too, over batches of `rows`
    tokens and `context` tokens before them (first and last), by measurements where there are any.
    `table.held_out` says by op how good decisions are where nothing was measured.

    Raises: ConfigurationError: nothing was measured for this device and no model is given, or the model's
        file is none that is understood. UnknownOpError: an op is unknown. ValueError: a span is none.
        FileExistsError: `path` is another kind of file.
    """
    need_own(Path(path), "buckets")
    ops_table.need_names(ops)
    runtime = context_runtime()
    opened = runtime.device(device)
    opened.wait_for_costs()
    if model is None and not isinstance(opened.costs, MeasuredCosts):
        raise ConfigurationError(f"solve needs measurements for {opened.hardware.name}, got none: tune first")
    asked: dict[str, list[CallSpec]] = {}
    for call in model_calls(ModelConfig.load(model), rows, context) if model is not None else ():
        request = call.request(opened.hardware)
        asked.setdefault(call.op, []).append(request)
        if opened.device.type == "cuda":
            asked[call.op].append(request.replace(modes=request.modes | {"capture"}))
    buckets: list[Bucket] = []
    held_out: dict[str, HeldOutResult] = {}
    for name in ops if ops is not None else sorted(ops_table.FILES):
        solved = solve_op(opened, ops_table.get(name), asked.get(name, ()))
        buckets += solved.buckets
        if solved.held_out is not None:
            held_out[name] = solved.held_out
    buckets.sort(key=lambda b: (b.op, b.dtype, b.capture, b.features, tuple(sorted(b.ranges.items()))))
    table = DispatchTable(
        date=datetime.now(UTC).date().isoformat(),
        hardware=Environment.of_hardware(opened.hardware),
        policy=runtime.policy.digest,
        limits={
            name: limits_of(name, opened.registry.for_op(name), opened.hardware.platform)
            for name in sorted({bucket.op for bucket in buckets})
        },
        content=content_hash(tuple(buckets)),
        held_out=held_out,
        buckets=tuple(buckets),
    )
    table.save(path)
    return table
