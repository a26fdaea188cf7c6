"""Deciding every measured bucket ahead: `solve` writes a dispatch table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from layerzero._util import log
from layerzero._util.files import need_own
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import context_runtime
from layerzero.ops import table as ops_table
from layerzero.ops.op import Op
from layerzero.perfdb.record import Environment
from layerzero.perfdb.table_file import content_hash
from layerzero.selection.cost.measured import MeasuredCosts
from layerzero.selection.dispatch_table import Bucket, DispatchTable, capabilities_hash
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError, NoKernelFoundError

BUCKET_REFUSED = "solve.bucket_refused"


def solve(
    path: str | os.PathLike[str], *, ops: Sequence[str] | None = None, device: str | None = None
) -> DispatchTable:
    """Decide every measured bucket now and write the decisions as a dispatch table.

    A runtime opened with `Settings(dispatch_table=path)` takes them from there. Buckets are those that were
    measured here or in a shipped table; tune first for others. Every bucket is warmed: a better kernel is
    loaded and compiled before the decision is written, so that none replaces one that was only cold.
    Raises: ConfigurationError: nothing was measured for this device. UnknownOpError: an op is unknown.
        FileExistsError: `path` is another kind of file.
    """
    need_own(Path(path), "buckets")
    runtime = context_runtime()
    opened = runtime.device(device)
    opened.wait_for_costs()
    costs = opened.costs
    if not isinstance(costs, MeasuredCosts):
        raise ConfigurationError(f"solve needs measurements for {opened.hardware.name}, got none: tune first")
    buckets = []
    for name in ops if ops is not None else sorted(ops_table.FILES):
        op = ops_table.get(name)
        for request, _ in costs.measured_buckets(name):
            try:
                selection = _decide_warm(opened, op, request)
            except NoKernelFoundError as error:
                log.warning(BUCKET_REFUSED, op=name, why=str(error).partition("\n")[0])
                continue
            buckets.append(_bucket(selection, request))
    buckets.sort(key=lambda b: (b.op, b.dtype, b.capture, b.features, tuple(sorted(b.dims.items()))))
    table = DispatchTable(
        date=datetime.now(UTC).date().isoformat(),
        hardware=Environment.of_hardware(opened.hardware),
        policy=runtime.policy.digest,
        capabilities=capabilities_hash(opened.registry.all()),
        content=content_hash(tuple(buckets)),
        buckets=tuple(buckets),
    )
    table.save(path)
    return table


def _decide_warm(device: LocalDevice, op: Op, request: CallSpec) -> Selection:
    """The decision once nothing better is cold; a kernel that does not load is no longer better."""
    selection = device.table(op).recompute(request, use_dispatch_table=False)
    tried: set[str] = set()
    while (better := selection.when_warm) is not None and better not in tried:
        tried.add(better)
        device.warm((better,), request)
        selection = device.table(op).recompute(request, use_dispatch_table=False)
    device.counters.add("buckets_warmed", op=op.name)
    return selection


def _bucket(selection: Selection, request: CallSpec) -> Bucket:
    accepted = selection.candidate(selection.kernel).accepted
    return Bucket(
        op=selection.op, kernel=selection.kernel, expected_us=round(selection.expected_us, 3),
        cost_source=accepted.source if accepted is not None else "", why=selection.why, dtype=request.dtype,
        dims=dict(request.dims), dtypes=tuple(sorted(set(request.dtypes))),
        features=tuple(sorted(request.features)), layout=request.layout, contiguous=request.contiguous,
        capture="capture" in request.modes,
    )  # fmt: skip
