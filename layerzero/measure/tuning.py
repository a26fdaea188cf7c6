"""Tuning a device for a workload: its rounds, what is published meanwhile, and the report."""

from __future__ import annotations

import itertools
import math
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import anyio
import msgspec

from layerzero._util import log
from layerzero._util.ending import ENDING
from layerzero.measure.calls import Call, workload_of
from layerzero.measure.compare import WinnerChange, find_uncovered, winner_changes
from layerzero.measure.shapes import standard_calls
from layerzero.measure.timing import QUICK, TimingBudget
from layerzero.measure.tuner import TunableDevice, Tuner, TuningResult
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import Environment, Launch, Measurement
from layerzero.perfdb.store import PerfDB, read_rows
from layerzero.selection.context import SelectionContext
from layerzero.selection.cost.cost_model import load_costs, perfdb_path
from layerzero.sharing.work import MEASURE, SHARED, PartialResult, digest_of
from layerzero.spec.errors import ConfigurationError, NoKernelFoundError

TUNED = "tuning.finished"
MEASURED_ELSEWHERE = "tuning.measured_elsewhere"
_KEEP_EVERY_S = 10.0
# A second round comes after the first of so many calls: a machine that is slow for a moment is slow in one.
_APART = 40

TuneProgress = Callable[[int, int, TuningResult | None], None]


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What tuning came to: one record a call and launch kind, and how steady the winners were.

    `compared` and `changes` speak of two tunes with `repeat=2`: calls, and those whose winners differ;
    `flipped` counts them, `flipped_outside` those outside the tie band, for which a third tune was made
    (`thirds` calls; the median counts). `skipped` calls had no time left.
    `path` is the file of rows.
    """

    device: str
    calls: int
    seconds: float
    tuned: tuple[TuningResult, ...]
    skipped: int = 0
    compared: int = 0
    changes: tuple[WinnerChange, ...] = ()
    thirds: int = 0
    path: str | None = None

    @property
    def flipped(self) -> int:
        """Winners that differ between two tunes."""
        return len(self.changes)

    @property
    def flipped_outside(self) -> int:
        """Those of them that noise does not explain."""
        return sum(change.outside for change in self.changes)

    @property
    def rows(self) -> tuple[Measurement, ...]:
        """Every measurement made."""
        return tuple(row for tuned in self.tuned for row in tuned.rows)

    @property
    def failures(self) -> dict[str, str]:
        """The kernels that could not be measured, with the first reason of each."""
        return {kernel: why for tuned in reversed(self.tuned) for kernel, why in tuned.failed.items()}


class _CutShortError(Exception):
    """The process ends: its report is no answer for others."""


class TuningJob:
    """One tuning of a device: what to measure, and what becomes of it.

    Raises: ValueError, TypeError: an argument is wrong, by name. UnknownOpError: an op does not exist.
    """

    def __init__(
        self, device: TunableDevice, workload: Any, *, ops: Sequence[str] | None,
        launches: Sequence[Launch], quick: bool, budget_s: float | None, repeat: int,
        missing: bool, progress: TuneProgress | None,
    ) -> None:  # fmt: skip
        ops_table.need_names(ops)
        if isinstance(launches, str) or not launches or not {*launches} <= {*get_args(Launch)}:
            raise ValueError(f"launches needs 'eager' and 'graph', or one of them, got {launches!r}")
        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"budget_s needs a number > 0, got {budget_s!r}")
        if isinstance(repeat, bool) or repeat not in (1, 2):
            raise ValueError(f"repeat needs 1 or 2, got {repeat!r}")
        self._device = device
        self._launches = tuple(launches)
        self._effort = QUICK if quick else TimingBudget()
        self._budget_s = budget_s
        self._repeat = repeat
        self._progress = progress
        if workload is None:
            self._calls = standard_calls(ops, self._device.device.type, quick)
        else:
            chosen = workload_of(workload)
            self._calls = tuple(c for c in chosen.calls if ops is None or c.op in ops)
        if missing:
            self._calls = tuple(missing_calls(self._device, self._calls, stored_rows(self._device)))
        self._tuner = Tuner(self._device, self._launches, self._effort)
        self._pending: list[Measurement] = []
        self._path: Path | None = None
        self._published_s, self._count = time.monotonic(), 0
        self._draft = PartialResult()
        self._made: list[list[TuningResult]] = []
        self._left: deque[list[TuningResult]] = deque()

    def key(self) -> Any:
        """Equal for jobs that measure the same on the same device."""
        calls = msgspec.json.encode(self._calls)
        return (id(self._device), calls, self._launches, self._effort, self._budget_s, self._repeat)

    def run(self) -> TuneReport:
        """Measure, publish and write; or take what another process measures, which began before.

        Where that one is killed, this one continues from what it had.
        Raises: ConfigurationError: measurements are to be kept where nothing can be written.
        """
        _need_writable(self._device)
        reports: list[TuneReport] = []

        def work() -> bytes:
            self._take_over()
            reports.append(self._run())
            if ENDING.is_set():
                raise _CutShortError
            return msgspec.json.encode(reports[0])

        try:
            answer = SHARED.once(MEASURE, self._digest(), work, self._draft)
        except _CutShortError:
            return reports[0]  # this process's own: who waits for all of it continues
        if not answer.leader:
            return reports[0]
        report = msgspec.json.decode(answer.body, type=TuneReport)
        log.info(MEASURED_ELSEWHERE, device=report.device, calls=report.calls, leader=answer.leader)
        path = publish(self._device, report.rows, again=True)
        if self._progress is not None:
            self._progress(report.calls, report.calls, report.tuned[-1] if report.tuned else None)
        return msgspec.structs.replace(report, path=str(path) if path else None)

    def _digest(self) -> str:
        """What a report follows from: equal in processes that would measure the same."""
        device = self._device
        ops = map(ops_table.get, sorted({call.op for call in self._calls}))
        contexts = [
            SelectionContext(device.registry.for_op(op.name), device.hardware, device.table(op).policy)
            for op in ops
        ]
        return digest_of(
            msgspec.json.encode(self._calls).decode(),
            [context.digest(context.kernels[0].op) for context in contexts if context.kernels],
            self._launches, self._effort, self._budget_s, self._repeat,
            (device.settings.tie_band, device.settings.default_gain),
        )  # fmt: skip

    def _take_over(self) -> None:
        """Keep what a leader that was killed had measured; its rows may be in the file already."""
        if self._draft.begun:
            self._made = msgspec.json.decode(self._draft.begun, type=list[list[TuningResult]])
            rows = [row for results in self._made for tuned in results for row in tuned.rows]
            self._path = publish(self._device, rows, again=True)
            self._left, self._made = deque(self._made), []

    def _run(self) -> TuneReport:
        started = time.monotonic()
        rounds: list[list[TuningResult]] = [[] for _ in range(self._repeat)]
        thirds: list[TuningResult] = []
        done = 0
        for begin in range(0, len(self._calls), _APART):
            block = self._calls[begin : begin + _APART]
            count = self._block(block, rounds, thirds, started)
            done += count
            if count < len(block):
                break
        self._publish_pending(force=True)
        skipped = len(self._calls) - done
        tuned = tuple(t for round_ in (*rounds, thirds) for t in round_)
        compared, changed = winner_changes(*rounds) if self._repeat == 2 else (0, ())
        report = TuneReport(
            device=str(self._device.device), calls=done, seconds=time.monotonic() - started, tuned=tuned,
            skipped=skipped, compared=compared, changes=changed, thirds=len({t.call for t in thirds}),
            path=str(self._path) if self._path else None,
        )  # fmt: skip
        log.info(TUNED, device=report.device, calls=report.calls, rows=len(report.rows), skipped=skipped)
        return report

    def _block(
        self,
        block: Sequence[Call],
        rounds: list[list[TuningResult]],
        thirds: list[TuningResult],
        started: float,
    ) -> int:
        """Measure each of a few calls once, then each again: the rounds of a call are spread over the time.

        Returns how many calls there was time for, once at least.
        """
        ends = started + self._budget_s if self._budget_s is not None else math.inf
        block_started, count = time.monotonic(), 0
        latest: list[list[TuningResult]] = [[] for _ in rounds]
        for call in block:
            now_s = time.monotonic()
            # The other rounds will take as long as the first has taken.
            if ENDING.is_set() or now_s + (now_s - block_started) * (len(rounds) - 1) > ends:
                break
            latest[0] += self._measure(call)
            count += 1
        for round_ in latest[1:]:
            for call in block[:count]:
                if time.monotonic() < ends and not ENDING.is_set():
                    round_ += self._measure(call)
        for round_, latest_round in zip(rounds, latest, strict=True):
            round_ += latest_round
        if len(latest) == 2:
            unsteady = {change.call for change in winner_changes(*latest)[1] if change.outside}
            for call in block[:count]:
                if str(call) in unsteady and time.monotonic() < ends and not ENDING.is_set():
                    thirds += self._measure(call)
        return count

    def _measure(self, call: Call) -> list[TuningResult]:
        if self._left and self._left[0][0].call == str(call):
            tuned_call = self._left.popleft()
        else:
            self._left.clear()  # the times led elsewhere
            tuned_call = self._tuner.measure(call)
            self._pending += [row for tuned in tuned_call for row in tuned.rows]
        self._made.append(tuned_call)
        self._count += 1
        if self._progress is not None:
            total = len(self._calls) * self._repeat
            self._progress(min(self._count, total), total, tuned_call[-1])
        self._publish_pending()
        return tuned_call

    def _publish_pending(self, force: bool = False) -> None:
        """Publish what was measured, every few seconds: what ends this process loses little."""
        if force or time.monotonic() - self._published_s > _KEEP_EVERY_S:
            self._draft.keep(msgspec.json.encode(self._made))
            self._path = publish(self._device, self._pending) or self._path
            self._pending, self._published_s = [], time.monotonic()


def missing_calls(device: TunableDevice, calls: Sequence[Call], rows: Iterable[Measurement]) -> list[Call]:
    """The calls that `rows` do not cover on a device (`tuning.missing`)."""
    takers_of_sites = [(call.benchmark_case(device.hardware), _takers(device, call)) for call in calls]
    return list(itertools.compress(calls, find_uncovered(takers_of_sites, rows)))


def _takers(device: TunableDevice, call: Call) -> set[str]:
    try:
        selection = device.table(ops_table.get(call.op)).recompute(call.request(device.hardware))
    except NoKernelFoundError:
        return set()  # tuning says why
    return {candidate.kernel for candidate in selection.trace if candidate.eligible}


def stored_rows(device: TunableDevice) -> tuple[Measurement, ...]:
    """What was measured in this environment and is kept: in the device's file, or in memory without one."""
    path = perfdb_path(device.settings)
    if path is None or not path.is_file():
        return device.measured
    return (*read_rows(path, Environment.of_hardware(device.hardware)), *device.measured)


def publish(device: TunableDevice, rows: Sequence[Measurement], *, again: bool = False) -> Path | None:
    """Keep rows in the device's file, if it has one, and price with them from now on.

    `again`: another process may have written them there.
    """
    path = perfdb_path(device.settings)
    if path is not None and rows:
        environment = Environment.of_hardware(device.hardware)
        stored = set(read_rows(path, environment)) if again else frozenset()
        if new := [row for row in rows if row not in stored]:
            anyio.run(_write, path, environment, new)
        device.measured = ()
    else:
        device.measured = (*device.measured, *rows)
    kernels = {kernel.id: kernel for kernel in device.registry.all()}
    device.set_costs(load_costs(device.settings, kernels, device.hardware, device.measured))
    return path if rows else None


def _need_writable(device: TunableDevice) -> None:
    """Open the file of measurements before the first of them is made, rather than lose them at the end."""
    path = perfdb_path(device.settings)
    if path is None:
        return
    try:
        anyio.run(_write, path, Environment.of_hardware(device.hardware), ())
    except (OSError, sqlite3.DatabaseError) as error:
        raise ConfigurationError(
            f"perfdb needs a file that can be written, got {path}: {error}; perfdb=None keeps nothing",
            field="perfdb",
        ) from error


async def _write(path: Path, environment: Environment, rows: Sequence[Measurement]) -> None:
    async with PerfDB(os.fspath(path)) as db:
        await db.add(environment, rows)
