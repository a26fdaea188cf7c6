"""Drift: sampled live calls are compared with the measurement that they were chosen by.

A driver, a power limit, a neighbour or a library can make a kernel slower than it was when it was tuned; a
choice by the old time stays where it is. One call in so many is timed. A kernel whose live median stays above
`FACTOR` times its measurement for `MIN_DURATION_S` seconds loses that measurement, with a log event and a
count. Where most of what runs became slower at once, the machine did, and no kernel loses anything.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import torch
from torch import Tensor

from layerzero._util import log
from layerzero.ops.op import Op
from layerzero.perfdb.record import Environment
from layerzero.selection.cost.cost_model import load_costs, perfdb_path
from layerzero.selection.cost.measured import MeasuredCosts
from layerzero.selection.cost.roofline import MEASURED, SHIPPED
from layerzero.selection.record import Selection
from layerzero.spec.kernel import Kernel

if TYPE_CHECKING:
    from layerzero.measure.tuner import TunableDevice

KERNEL_DRIFTED = "kernel.drifted"
MACHINE_SLOWED = "machine.slowed_down"
NOT_WRITTEN = "drift.not_written"
# A live call finds colder caches than a tuned one: less than this is no news.
FACTOR = 2.0
SAMPLES = 16
MIN_DURATION_S = 30.0
# Below this the clock and the interpreter are most of what one call shows.
MIN_US = 20.0
_NOT_TIMED = frozenset({"grad", "autocast", "capture"})
_MAX_KEYS = 1024
_PENDING = 64


class Slowdown(msgspec.Struct, frozen=True):
    """What became slower: `times` the measurement, over `seconds`; `machine` says that most else did, too."""

    key: Hashable
    ratio: float
    seconds: float
    machine: bool


class _LiveTimes:
    __slots__ = ("ratios", "reported", "since")

    def __init__(self) -> None:
        self.ratios: deque[float] = deque(maxlen=SAMPLES)
        self.since: float | None = None
        self.reported = False


class DriftDetector:
    """Live times by measurement key, and which have been too slow for too long; no thread, no file."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times_by_key: dict[Hashable, _LiveTimes] = {}

    def observe(self, key: Hashable, us: float, expected_us: float) -> Slowdown | None:
        """Add one live time; returns the slowdown, once, where this measurement has drifted."""
        with self._lock:
            times = self._times_by_key.get(key)
            if times is None:
                if len(self._times_by_key) >= _MAX_KEYS:
                    self._times_by_key.pop(next(iter(self._times_by_key)))
                times = self._times_by_key[key] = _LiveTimes()
            times.ratios.append(us / expected_us)
            if len(times.ratios) < SAMPLES:
                return None
            slowdown, now_s = statistics.median(times.ratios), self._clock()
            if slowdown <= FACTOR:
                times.since, times.reported = None, False
                return None
            if times.since is None:
                times.since = now_s
            if times.reported or now_s - times.since < MIN_DURATION_S:
                return None
            times.reported = True
            return Slowdown(key, slowdown, now_s - times.since, self._machine_slowed(key))

    def forget(self, key: Hashable) -> None:
        """Forget the live times of a measurement."""
        with self._lock:
            self._times_by_key.pop(key, None)

    def _machine_slowed(self, key: Hashable) -> bool:
        others = [
            statistics.median(times.ratios)
            for other, times in self._times_by_key.items()
            if other != key and len(times.ratios) == SAMPLES
        ]
        return len(others) >= 2 and statistics.median(others) > FACTOR


class DriftWatch:
    """Times one call in `round(1 / rate)` of every plan that a measurement chose."""

    reads_arguments = True

    def __init__(
        self, device: TunableDevice, rate: float, ticks: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._device = device
        self._period = max(1, round(1 / rate))
        self._ticks = ticks
        self._drift = DriftDetector(device.clock.now)
        self._pending: deque[tuple[Any, Any, Selection, Hashable]] = deque(maxlen=_PENDING)
        self._forgotten: frozenset[Hashable] = frozenset()
        self._closed = False

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, now and then timed; plans that rest on estimates, and short ones, are left alone."""
        costs = self._device.costs
        accepted = next((c.accepted for c in selection.trace if c.kernel == selection.kernel), None)
        if (
            accepted is None
            or accepted.source not in (MEASURED, SHIPPED)
            or accepted.transforms
            or not isinstance(costs, MeasuredCosts)
            or selection.expected_us < MIN_US
            or selection.request.modes & _NOT_TIMED
        ):
            return call
        key = costs.key_of(selection.kernel, selection.request)
        if key is None:
            return call
        turns, period = itertools.count(1), self._period

        def timed(*args: Any) -> Any:
            if next(turns) % period:
                return call(*args)
            return self._timed(selection, key, call, args)

        return timed

    def close(self) -> None:
        """Time no more."""
        self._closed = True
        self._pending.clear()

    def _timed(
        self, selection: Selection, key: Hashable, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        if any(isinstance(a, Tensor) and a.is_cuda for a in args):
            return self._between_events(selection, key, call, args)
        begin = self._ticks()
        result = call(*args)
        self._record(selection, key, (self._ticks() - begin) / 1e3)
        return result

    def _between_events(
        self, selection: Selection, key: Hashable, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """Time on the device; read at a later sample, so that no caller waits for it."""
        while self._pending and self._pending[0][1].query():
            begin, end, earlier, earlier_key = self._pending.popleft()
            self._record(earlier, earlier_key, begin.elapsed_time(end) * 1e3)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = call(*args)
        end.record()
        self._pending.append((begin, end, selection, key))
        return result

    def _record(self, selection: Selection, key: Hashable, us: float) -> None:
        slowdown = self._drift.observe(key, us, selection.expected_us)
        if slowdown is None or self._closed:
            return
        kernel = selection.kernel
        what = {"kernel": kernel, "op": selection.op, "times": round(slowdown.ratio, 2)}
        if slowdown.machine:
            self._device.counters.add("machine_slowdowns")
            log.warning(MACHINE_SLOWED, **what, expected_us=round(selection.expected_us, 1))
            return
        self._device.counters.add("drifts", kernel=kernel)
        sizes = " ".join(f"{name}={size}" for name, size in selection.request.dims.items())
        log.warning(
            KERNEL_DRIFTED,
            **what,
            expected_us=round(selection.expected_us, 1),
            seconds=round(slowdown.seconds),
            sizes=sizes,
            why="its measurement no longer counts: tune again",
        )
        threading.Thread(target=self.forget, args=(kernel, key), name="layerzero-drift", daemon=True).start()

    def forget(self, kernel: str, key: Hashable) -> None:
        """Let a kernel's measurements under `key` count no longer, here and in the file; then choose anew."""
        device = self._device
        costs = device.costs
        if not isinstance(costs, MeasuredCosts):
            return
        self._forgotten |= {key}
        path = perfdb_path(device.settings)
        if path is not None and path.is_file():
            try:
                anyio.run(_discard, path, Environment.of_hardware(device.hardware), kernel, key)
            except OSError as error:
                log.warning(NOT_WRITTEN, kernel=kernel, error=str(error))
        kernels: dict[str, Kernel] = {k.id: k for k in device.registry.all()}
        self._drift.forget(key)
        device.set_costs(
            load_costs(device.settings, kernels, device.hardware, device.measured, excluded=self._forgotten)
        )


async def _discard(path: Any, environment: Environment, kernel: str, key: Hashable) -> None:
    from layerzero.perfdb.store import PerfDB
    from layerzero.selection.cost.measured import measurement_key

    async with PerfDB(path) as db:
        rows = [
            row for row in await db.rows(environment) if row.kernel == kernel and measurement_key(row) == key
        ]
        await db.discard(environment, rows)
