"""Drift: a kernel that became slower for good loses its measurement; noise and load do nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.measure import drift
from layerzero.measure.drift import FACTOR, MIN_DURATION_S, SAMPLES, DriftDetector, DriftWatch
from layerzero.ops import table as ops_table
from layerzero.perfdb.store import PerfDB, read_rows
from layerzero.selection.cost.cost_model import load_costs
from layerzero.spec.settings import Settings
from tests.clocks import FakeClock
from tests.kernels import device, kernel
from tests.perfdb.rows import HERE, row

NORM = ops_table.get("rms_norm")
X, WEIGHT = torch.randn(64, 512), torch.randn(512)


class Ticks:
    """Nanoseconds that only kernels move."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Site:
    """A device with two measured kernels whose speed the test sets, on clocks that the test moves."""

    def __init__(self, path: Path, rate: float = 1.0) -> None:
        self.ticks, self.clock, self.us = Ticks(), FakeClock(), {"first": 100.0, "other": 150.0}
        self.path = path
        anyio.run(self._write)
        settings = Settings(perfdb=str(path), shipped_tables=False, warm="off")
        made = [
            kernel("first.rms_norm", self._taking("first"), launch_us=400.0),
            kernel("other.rms_norm", self._taking("other"), launch_us=400.0),
        ]
        self.device: LocalDevice = device(made, settings, clock=self.clock)
        self.device.set_costs(load_costs(settings, {k.id: k for k in made}, self.device.hardware))
        self.watch = DriftWatch(self.device, rate, self.ticks)
        self.device.add_middleware(self.watch)

    async def _write(self) -> None:
        async with PerfDB(self.path) as db:
            await db.add(HERE, [row("first.rms_norm", 100.0), row("other.rms_norm", 150.0)])

    def _taking(self, name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.ticks.ns += int(self.us[name] * 1000)
            return NORM.reference(*args)

        return run

    def calls(self, count: int, every_s: float = 1.0) -> str:
        """Who ran the last of so many calls."""
        used = ""
        for _ in range(count):
            used = self.device.launch_planned(NORM, (X, WEIGHT, 1e-6))[1].kernel
            self.clock.advance(every_s)
        for thread in threading.enumerate():
            if thread.name == "layerzero-drift":
                thread.join()
        return used

    def drifts(self) -> int:
        return int(self.device.counters.total("drifts"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "perf.sqlite")
    yield made
    made.device.close()


def test_a_persistent_slowdown_costs_the_measurement(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """After the time it takes to be sure: an event, a count, no row in the file, and another choice."""
    assert site.calls(SAMPLES) == "first.rms_norm" and site.drifts() == 0
    site.us["first"] = 100.0 * FACTOR * 1.5
    site.calls(SAMPLES + int(MIN_DURATION_S) + 2)
    assert site.drifts() == 1
    assert sum(drift.KERNEL_DRIFTED in r.getMessage() for r in caplog.records) == 1
    assert [r.kernel for r in read_rows(site.path, HERE)] == ["other.rms_norm"]
    assert site.calls(1) == "other.rms_norm"


def test_a_kernel_that_stays_as_it_was_keeps_its_place(site: Site) -> None:
    """The negative control: as many calls at the measured speed, or a little slower, change nothing."""
    site.us["first"] = 100.0 * FACTOR * 0.9
    assert site.calls(3 * SAMPLES + int(MIN_DURATION_S)) == "first.rms_norm"
    assert site.drifts() == 0 and len(read_rows(site.path, HERE)) == 2


def test_a_spell_is_no_drift(site: Site) -> None:
    """Slow for less than it takes to be sure, then as before: nothing is lost."""
    site.us["first"] = 1000.0
    site.calls(SAMPLES // 2 + int(MIN_DURATION_S) - 2)
    site.us["first"] = 100.0
    assert site.calls(3 * SAMPLES) == "first.rms_norm" and site.drifts() == 0


def test_seldom_slow_is_no_drift(site: Site) -> None:
    """A third of the calls ten times slower, for ever: the median is what it was."""
    for _ in range(40):
        site.us["first"] = 1000.0
        site.calls(1)
        site.us["first"] = 100.0
        site.calls(2)
    assert site.drifts() == 0


def test_without_a_measurement_nothing_is_timed(site: Site) -> None:
    """Estimated plans, short ones and those of other modes are the plain call itself."""
    table = site.device.table(NORM)

    def call() -> None:
        return None

    measured = table.recompute(table.describe((X, WEIGHT, 1e-6), site.device.mode()))
    elsewhere = table.recompute(
        table.describe((torch.randn(8, 64), torch.randn(64), 1e-6), site.device.mode())
    )
    graded = table.recompute(table.describe((X.clone().requires_grad_(), WEIGHT, 1e-6), site.device.mode()))
    assert site.watch.wrap(NORM, measured, call) is not call
    assert site.watch.wrap(NORM, elsewhere, call) is call
    assert site.watch.wrap(NORM, graded, call) is call


def test_one_call_in_so_many_is_timed(tmp_path: Path) -> None:
    """At a rate of a quarter, the window fills after four times as many calls."""
    made = Site(tmp_path / "perf.sqlite", rate=0.25)
    try:
        made.us["first"] = 1000.0
        made.calls(4 * SAMPLES - 1, every_s=10.0)
        assert made.drifts() == 0
        made.calls(4 * 2 + 1, every_s=10.0)
        assert made.drifts() == 1
    finally:
        made.device.close()


def test_a_slow_machine_is_told_apart() -> None:
    """Where most of what runs became slower at once, the finding names the machine; alone, the kernel."""
    clock = FakeClock()
    together, alone = DriftDetector(clock.now), DriftDetector(clock.now)
    told = []
    for _ in range(SAMPLES + int(MIN_DURATION_S) + 1):
        told += [together.observe(name, 300.0, 100.0) for name in ("a", "b", "c")]
        told += [alone.observe(name, 300.0 if name == "a" else 100.0, 100.0) for name in ("a", "b", "c")]
        clock.advance(1.0)
    findings = [f for f in told if f is not None]
    assert [(f.key, f.machine) for f in findings] == [("a", True), ("b", True), ("c", True), ("a", False)]
    assert findings[-1].ratio == 3.0 and findings[-1].seconds >= MIN_DURATION_S


def test_the_setting_switches_it(tmp_path: Path) -> None:
    """`drift_rate` puts the watch around plans, and takes it away again; by default there is none."""
    made = device([kernel("first.rms_norm")], Settings(perfdb=None))
    assert not any(isinstance(w, DriftWatch) for w in made.compiler.middlewares)
    made.set_settings(Settings(perfdb=None, drift_rate=0.5, check_rate=0.1))
    assert (
        sum(isinstance(w, DriftWatch) for w in made.compiler.middlewares) == 1
        and len(made.compiler.middlewares) == 2
    )
    made.set_settings(Settings(perfdb=None))
    assert made.compiler.middlewares == ()
    made.close()
