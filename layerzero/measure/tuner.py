"""Tuning one device for calls: every kernel that takes a call is gated, timed beside the others, and noted.

The order is: make the call, load each kernel, compare its numbers with the reference on poisoned memory,
and only then time it. A kernel that fails the gate is never timed; a kernel that cannot be loaded, run or
captured is reported with its reason, and the others continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from layerzero._util import log
from layerzero._util.clock import Clock
from layerzero.measure import conditions
from layerzero.measure.calls import Call
from layerzero.measure.correctness import clone_tensors, find_mismatch, poison
from layerzero.measure.timing import Timing, TimingBudget, copies_for, time_kernels
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.perfdb.record import BenchmarkCase, Launch, Measurement, versions_of
from layerzero.selection.context import CostModel, SelectionOptions
from layerzero.selection.decide import pick
from layerzero.selection.record import Accepted, Candidate, Selection, format_bytes
from layerzero.selection.workspace import workspace_bytes
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import LayerZeroError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

KERNEL_REFUSED = "tuning.kernel_refused"
MEASURED = "tuning.call_measured"
# Above this much arithmetic the reference would take longer than all the timing; the default kernel's
# numbers replace it then.
_REFERENCE_FLOPS = {"cpu": 3e10, "cuda": 5e12}
_MAX_COPY_BYTES = 8 << 30
_MAX_WORKSPACE = 4 << 30
# A kernel that takes this many times the best when launched is not worth a graph.
_MAX_CAPTURED_RATIO = 12.0


class TunableDevice(Protocol):
    """What tuning, solving and watching need of a device; `LocalDevice` is one."""

    device: torch.device
    hardware: Hardware
    settings: Settings
    registry: Any
    counters: Any
    clock: Clock
    mode: Callable[[], int]
    measured: tuple[Measurement, ...]

    @property
    def costs(self) -> Any: ...

    def table(self, op: Op) -> Any: ...

    def warm(self, kernel_ids: Sequence[str], request: CallSpec | None = None) -> None: ...

    def callable_for(self, op: Op, selection: Selection, kernel_id: str) -> Callable[..., Any]: ...

    def set_costs(self, cost: CostModel) -> None: ...


class TuningResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one call came to: times by kernel in microseconds (transforms included), who won, who failed why.

    `best` is the fastest; `winner` the one that band and default guard give; `tied` all that another tune may
    find inside the `band` (the wider of tie band and default guard): their lower quartile is within it,
    counted from the fastest's upper one.
    """

    call: str
    op: str
    launch: Launch
    winner: str = ""
    best: str = ""
    times_us: dict[str, float] = {}
    timings: dict[str, Timing] = {}
    tied: tuple[str, ...] = ()
    band: float = 0.05
    failed: dict[str, str] = {}
    rows: tuple[Measurement, ...] = ()


class Tuner:
    """Measures calls on one device, in the thread that asks."""

    def __init__(self, device: TunableDevice, launches: Sequence[Launch], effort: TimingBudget) -> None:
        self._device = device
        self._launches = launches if device.device.type == "cuda" else ("eager",)
        self._effort = effort

    def measure(self, call: Call, seed: int = 0) -> list[TuningResult]:
        """One record a launch kind; a call that no kernel takes gives its reason under the name `call`."""
        op = ops_table.get(call.op)
        try:
            with torch.no_grad():
                return self._measure(op, call, seed)
        except (LayerZeroError, ValueError, TypeError, torch.OutOfMemoryError) as error:
            log.warning(KERNEL_REFUSED, op=call.op, kernel="", why=str(error)[:200])
            why = {"call": f"{type(error).__name__}: {error}"[:300]}
            return [TuningResult(call=str(call), op=call.op, launch=self._launches[0], failed=why)]

    def _measure(self, op: Op, call: Call, seed: int) -> list[TuningResult]:
        device = self._device
        args = call.make(device.device, seed)
        if op.empty is not None and op.empty(args) is not None:
            raise ValueError(f"a call that is timed needs something to compute, got the empty {call}")
        table = device.table(op)
        request = table.describe(args, device.mode())
        selection: Selection = table.recompute(request)
        runs, failed = self._verified(op, args, request, selection)
        if not runs:
            return [TuningResult(call=str(call), op=op.name, launch=self._launches[0], failed=failed)]
        count = copies_for(call.operand_bytes(), device.device, _MAX_COPY_BYTES)
        copies = [args, *(call.make(device.device, seed + n) for n in range(1, count))]
        results: list[TuningResult] = []
        for launch in self._launches:
            if launch == "graph" and results:
                times = results[0].times_us
                most_us = min(times.values(), default=0.0) * _MAX_CAPTURED_RATIO
                runs = {kernel: run for kernel, run in runs.items() if times.get(kernel, 0.0) <= most_us}
            timings, broke = time_kernels(runs, copies, device.device, launch, self._effort)
            tuned = self._record(op, call, request, selection, launch, timings)
            results.append(msgspec.structs.replace(tuned, failed={**failed, **broke}))
        return results

    def _verified(
        self, op: Op, args: Args, request: CallSpec, selection: Selection
    ) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
        """The kernels whose numbers are right, loaded; and why each other one is not."""
        device = self._device
        runs: dict[str, Callable[..., Any]] = {}
        failed: dict[str, str] = {}
        expected: Any = None
        kernels = {k.id: k for k in device.registry.for_op(op.name)}
        ordered = sorted(selection.order, key=lambda k: not kernels[k].default)
        heavy = op.work(request).flops > _REFERENCE_FLOPS.get(device.device.type, 3e10)
        if not heavy:
            expected = op.reference(*clone_tensors(args))
        others = [c.kernel for c in selection.trace if c.eligible and c.kernel not in ordered]
        for kernel_id in others + ordered:
            if heavy and kernels[kernel_id].backend == "reference":
                continue  # it would take the whole budget and is never chosen at such a size
            if workspace_bytes(kernels[kernel_id], request) > _MAX_WORKSPACE:
                failed[kernel_id] = f"its workspace takes more than {format_bytes(_MAX_WORKSPACE)}"
                continue
            try:
                run = device.callable_for(op, selection, kernel_id)
                arguments = clone_tensors(args) if not op.pure else args
                poison(args)
                result = run(*arguments)
                if expected is None:
                    expected = result
                mismatch = None if op.stochastic else find_mismatch(op, args, result, expected)
            except Exception as error:
                failed[kernel_id] = f"{type(error).__name__}: {error}"[:300]
            else:
                if mismatch is None:
                    runs[kernel_id] = run
                else:
                    failed[kernel_id] = f"wrong: {mismatch}"
            if kernel_id in failed:
                log.warning(KERNEL_REFUSED, op=op.name, kernel=kernel_id, why=failed[kernel_id])
        return runs, failed

    def _record(
        self, op: Op, call: Call, request: CallSpec, selection: Selection, launch: Launch,
        timings: dict[str, Timing],
    ) -> TuningResult:  # fmt: skip
        kernels = {k.id: k for k in self._device.registry.for_op(op.name)}
        times = {kernel: timing.median_us for kernel, timing in timings.items()}
        state = conditions.read_conditions(self._device.device)
        rows = tuple(
            _row(kernels[k], selection.candidate(k), request, launch, timing, state)
            for k, timing in timings.items()
        )
        settings = self._device.settings
        options = SelectionOptions(False, settings.tie_band, settings.default_gain)
        winner, tied = pick_winner(times, kernels, options)
        best = min(times, key=times.__getitem__) if times else ""
        band = max(settings.tie_band, settings.default_gain)
        if best:
            tied = tuple(sorted({*tied, *tied_with(best, timings, band)}))
        log.debug(MEASURED, op=op.name, winner=winner, us=times.get(winner))
        return TuningResult(
            call=str(call), op=op.name, launch=launch, winner=winner, best=best, times_us=times,
            timings=timings, tied=tied, band=band, rows=rows,
        )  # fmt: skip


def pick_winner(
    times: dict[str, float], kernels: dict[str, Kernel], options: SelectionOptions
) -> tuple[str, tuple[str, ...]]:
    """Which of the kernels with these times is chosen, and which are in the tie band or the guard's gain."""
    if not times:
        return "", ()
    pool = [Candidate(k, kernels[k].backend, Accepted(us, 0.0, us, "measured")) for k, us in times.items()]
    chosen, _ = pick(pool, kernels, options)
    floor = min(times.values()) * (1 + max(options.tie_band, options.default_gain))
    return chosen.kernel, tuple(sorted(k for k, us in times.items() if us <= floor))


def tied_with(best: str, timings: Mapping[str, Timing], band: float) -> tuple[str, ...]:
    """The kernels whose lower quartile is within the band, counted from the fastest's upper one."""
    upper = timings[best].quantile_us(0.75) * (1 + band)
    return tuple(sorted(kernel for kernel, timing in timings.items() if timing.quantile_us(0.25) <= upper))


def _row(
    kernel: Kernel, candidate: Candidate, request: CallSpec, launch: Launch, timing: Timing,
    state: conditions.Conditions,
) -> Measurement:  # fmt: skip
    """The row of a kernel alone: what its transforms are priced at is taken off, since a choice adds it."""
    accepted = candidate.accepted
    transform_us = accepted.transform_us if accepted is not None else 0.0
    cast = next((t.after for t in accepted.transforms if t.kind == "cast"), None) if accepted else None
    # Where most of the time would be transforms their price is off: half is the kernel's then, or a size
    # that needs none would look as good as free.
    median = max(timing.median_us - transform_us, timing.median_us / 2)
    return Measurement(
        case=BenchmarkCase.of_request(request, cast),
        kernel=kernel.id,
        version=versions_of(kernel),
        launch=launch,
        cache=timing.cache,
        median_us=round(median, 4),
        p95_us=round(timing.quantile_us(0.95), 4),
        variance=round(timing.variance, 6),
        samples=len(timing.samples),
        timestamp=int(time.time()),
        temperature_c=state.temperature_c,
        power_w=state.power_w,
        free_bytes=state.free_bytes,
    )
