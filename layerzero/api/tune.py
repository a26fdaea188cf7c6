"""Measuring kernels: `tune` and `record`, and where the times are kept."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel

import layerzero
from layerzero._util import log
from layerzero._util.ending import join_at_exit
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import context_runtime
from layerzero.measure.calls import Call, Workload
from layerzero.measure.compare import KernelComparison, head_to_head
from layerzero.measure.recorder import Recorder
from layerzero.measure.timing import TimingBudget
from layerzero.measure.tuner import Tuner
from layerzero.measure.tuning import TuneProgress, TuneReport, TuningJob, publish
from layerzero.perfdb.record import Environment, Launch, Measurement, implausible_reason
from layerzero.perfdb.shipped import Provenance, ShippedTable, condense, write_table
from layerzero.scheduler.single_flight import SingleFlight

P = ParamSpec("P")
R = TypeVar("R")


async def tune(
    workload: Workload | str | Path | Iterable[Call] | None = None,
    *,
    ops: Sequence[str] | None = None,
    device: str | None = None,
    launches: Sequence[Launch] = ("eager", "graph"),
    quick: bool = False,
    budget_s: float | None = None,
    repeat: int = 1,
    missing: bool = False,
    progress: TuneProgress | None = None,
) -> TuneReport:
    """Measure every kernel that takes a workload's calls, keep the times, and choose by them from now on.

    `workload` is a list of calls, what `record()` gave or its file, or None for the standard shapes of `ops`
    (of every op by default). Numbers are checked before anything is timed. On CUDA, times are taken launched
    eagerly and replayed as a graph. `budget_s` ends it early; `missing` leaves out calls whose measurements
    this machine's file holds, so that the next run continues where one ended; a call is measured again where
    a kernel takes it that came later. `repeat=2` measures twice, some time apart, and reports how many
    winners changed; where that was no noise, a third time.
    `progress(done, total, tuned)` is called from the measuring thread. Callers who ask for the same at once
    share one measuring.

    Raises: ConfigurationError: the workload cannot be read. UnknownOpError: an op does not exist.
    """
    job = TuningJob(
        context_runtime().device(device), workload, ops=ops, launches=launches, quick=quick,
        budget_s=budget_s, repeat=repeat, missing=missing, progress=progress,
    )  # fmt: skip
    finished = anyio.Event()
    token = anyio.lowlevel.current_token()
    flight = _FLIGHTS.flight(job.key(), job.run)

    def notify(landed: Future[TuneReport]) -> None:
        if landed.cancelled():
            return  # by the last to leave, on the loop itself: no caller waits
        try:
            anyio.from_thread.run_sync(finished.set, token=token)
        except RuntimeError:
            log.debug("tuning.caller_gone")  # its loop ended while we measured

    # From a thread of its own: a flight that has landed meanwhile calls back at once, and not from the loop.
    threading.Thread(
        target=flight.future.add_done_callback, args=(notify,), name="layerzero-tune-reports", daemon=True
    ).start()
    try:
        await finished.wait()
    finally:
        flight.leave()
    return flight.result()


@contextlib.contextmanager
def record() -> Iterator[Recorder]:
    """Record the calls of every device of this runtime during the block, merged batches as they ran.

    `with lz.record() as seen: ...`, then `lz.tune(seen.workload())` or `seen.save(path)`. A call costs a few
    microseconds more meanwhile; outside the block nothing is left.
    """
    runtime, recorder = context_runtime(), Recorder()
    runtime.device()
    devices = list(runtime.devices.values())
    for device in devices:
        device.add_middleware(recorder)
    try:
        yield recorder
    finally:
        for device in devices:
            device.remove_middleware(recorder)


def _blocking(_: Callable[P, Awaitable[R]]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """What a blocking function is declared as: its awaited twin without the await."""
    return lambda fn: fn


@_blocking(tune)
def tune_blocking(workload: Any = None, **options: Any) -> TuneReport:
    """`tune`, blocking: it takes the same arguments."""
    defaults: dict[str, Any] = dict(tune.__kwdefaults__ or {})
    if unknown := options.keys() - defaults.keys():
        raise TypeError(f"tune() has no argument {min(unknown)!r}")
    arguments = defaults | options
    job = TuningJob(context_runtime().device(arguments.pop("device")), workload, **arguments)
    return _FLIGHTS.flight(job.key(), job.run).wait()


def _start(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, name="layerzero-tune", daemon=True)
    thread.start()
    join_at_exit(thread)


_FLIGHTS: SingleFlight[TuneReport] = SingleFlight(_start)


def bench_call(
    device: LocalDevice, call: Call, launch: Launch = "eager", *, baseline: str = "", samples: int = 31,
    save: bool = False,
) -> KernelComparison:  # fmt: skip
    """Every kernel that takes `call` on `device`, head to head; `save` keeps the times for choices.

    Raises: ValueError: nothing could be timed, the call computes nothing, or `baseline` was not timed.
        NoKernelFoundError: no kernel takes it.
    """
    effort = TimingBudget(samples=samples, budget_s=2.0)
    tuned = Tuner(device, (launch,), effort).measure(call)[-1]
    if why := tuned.failed.get("call"):
        raise ValueError(why)
    default = next((k.id for k in device.registry.for_op(call.op) if k.default and k.id in tuned.timings), "")
    comparison = head_to_head(
        tuned.timings, baseline or default, tie_band=device.settings.tie_band, failed=tuned.failed
    )
    if save:
        publish(device, tuned.rows)
    return comparison


def write_shipped_table(
    rows: Sequence[Measurement],
    device: LocalDevice,
    path: str | os.PathLike[str],
    *,
    command: str,
    note: str = "",
) -> ShippedTable:
    """Write rows as a table that ships: with who made it, when, and with which libraries.

    Rows that no choice would believe are left out; of several tunes of a call there is one row.
    """
    rows = condense(row for row in rows if not implausible_reason(row))
    provenance = Provenance(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        version=layerzero.__version__,
        environment=Environment.of_hardware(device.hardware),
        libraries=tuple(sorted({row.version for row in rows if row.version})),
        note=note,
    )
    return write_table(path, provenance, list(rows))
