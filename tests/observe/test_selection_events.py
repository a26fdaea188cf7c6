"""What decisions and kernels tell: histograms, the debug event, and nothing where a call is remembered."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.api import metrics
from layerzero.observe import selection_events
from layerzero.observe.counters import Counters
from layerzero.observe.histograms import (
    MAX_PENDING,
    MAX_SERIES,
    OVERFLOW,
    SECONDS,
    Histograms,
    HistogramSeries,
)
from layerzero.observe.kernel_times import KERNEL_SECONDS, KernelTimes
from layerzero.observe.selection_events import SELECTION_MADE, SELECTION_SECONDS
from layerzero.ops.op import OPS


def test_no_duration_is_lost_under_threads() -> None:
    """Eight threads observe ten thousand durations each: the count and the sum are exact."""
    series = HistogramSeries()

    def observe() -> None:
        for _ in range(10_000):
            series.observe(0.25)

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts, total = series.snapshot()
    assert sum(counts) == 80_000 and total == 20_000.0 and counts[SECONDS.index(0.3)] == 80_000


def test_a_bound_counts_what_is_at_most_as_long() -> None:
    """At a bound, below it, above all of them."""
    series = HistogramSeries()
    for seconds in (0.0, SECONDS[0], SECONDS[0] * 1.5, 99.0):
        series.observe(seconds)
    counts, _ = series.snapshot()
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)


def test_a_duration_waits_for_no_lock_and_those_that_wait_are_bounded() -> None:
    """While another counts, durations are only kept; then at most `MAX_PENDING` of them stay uncounted."""
    series = HistogramSeries()
    with series._lock:
        for _ in range(3 * MAX_PENDING):
            series.observe(0.25)
    assert len(series.pending) == 3 * MAX_PENDING
    for _ in range(10):
        series.observe(0.25)
        assert len(series.pending) < MAX_PENDING
    counts, total = series.snapshot()
    assert series.pending == [] and sum(counts) == 3 * MAX_PENDING + 10 and total == sum(counts) / 4


def test_labels_of_others_are_bounded() -> None:
    """Beyond the limit, further label values share one series."""
    histograms = Histograms()
    for number in range(MAX_SERIES + 50):
        histograms.series("kernel_seconds", kernel=f"k{number}").observe(1.0)
    assert histograms.count("kernel_seconds") == MAX_SERIES + 50
    overflow = histograms.series("kernel_seconds", kernel=OVERFLOW)
    assert sum(overflow.snapshot()[0]) == 50


def test_a_decision_is_observed_and_a_remembered_call_is_not() -> None:
    """One selection for a new call, none for the same call again."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as runtime:
        for _ in range(20):
            lz.sync.rms_norm(torch.ones(3, 8))
        assert runtime.counters.histograms.count(SELECTION_SECONDS) == 1
        assert runtime.counters.histograms.count(KERNEL_SECONDS) == 0
        lz.sync.rms_norm(torch.ones(3, 9))
        assert runtime.counters.histograms.count(SELECTION_SECONDS) == 2


def test_a_decision_is_a_debug_event_with_its_record_in_short(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Kernel, why, costs, refusals by code, the policy's digest; a refused call is observed as well."""
    caplog.set_level(logging.DEBUG, "layerzero")
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nrules:\n  - deny: [reference.layer_norm]\n")
    settings = lz.Settings(device="cpu", warm="off", policy=str(policy))
    with lz.start(settings, scoped=True) as runtime:
        lz.sync.layer_norm(torch.ones(3, 8))
        with pytest.raises(ValueError, match="weight"):
            lz.sync.layer_norm(torch.ones(3, 8), torch.ones(4))
        assert runtime.counters.histograms.count(SELECTION_SECONDS) == 2
    (event,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith(SELECTION_MADE)]
    assert "kernel='torch.layer_norm.native'" in event and "expected_us=" in event and "priced_by=" in event
    assert (
        "PLATFORM_MISMATCH" in event
        and "POLICY_DENIED" in event
        and re.search(r"policy='[0-9a-f]{12}'", event)
    )


def test_events_are_sampled_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many in a second they are left out, and their number is a counter."""
    caplog.set_level(logging.DEBUG, "layerzero")
    monkeypatch.setattr(selection_events, "MAX_PER_S", 2)
    monkeypatch.setattr(selection_events, "monotonic", lambda: 7.0)
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as runtime:
        for width in range(8, 13):
            lz.sync.rms_norm(torch.ones(1, width))
        assert runtime.counters.get("selection_events_dropped") == 3
    assert sum(r.getMessage().startswith(SELECTION_MADE) for r in caplog.records) == 2


def test_kernel_times_count_every_call_by_kernel() -> None:
    """Switched on, remembered calls are counted, too, by op and kernel; a call that raises counts."""
    with lz.start(lz.Settings(device="cpu", warm="off", kernel_times=True), scoped=True) as runtime:
        for _ in range(20):
            lz.sync.rms_norm(torch.ones(3, 8), backend="torch")
        series = runtime.counters.histograms.series(
            KERNEL_SECONDS, op="rms_norm", kernel="torch.rms_norm.native"
        )
        counts, total = series.snapshot()
    assert sum(counts) == 20 and total > 0


def test_kernel_times_count_what_raises_and_leave_captures_alone() -> None:
    """An error passes through and its call counts; a plan for a capture is the kernel itself."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("of the kernel")

    counters = Counters()
    selection = lz.select("rms_norm", torch.ones(3, 8))
    timed = KernelTimes(counters).wrap(OPS["rms_norm"], selection, fails)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="of the kernel"):
            timed()
    series = counters.histograms.series(KERNEL_SECONDS, op="rms_norm", kernel=selection.kernel)
    assert sum(series.snapshot()[0]) == 3
    request = selection.request.replace(modes=selection.request.modes | {"capture"})
    captured = msgspec.structs.replace(selection, request=request)
    assert KernelTimes(counters).wrap(OPS["rms_norm"], captured, fails) is fails


def test_times_of_kernels_are_kept_for_a_bounded_number_of_calls() -> None:
    """More calls than may wait are counted while they run, before anybody reads."""
    with lz.start(lz.Settings(device="cpu", warm="off", kernel_times=True), scoped=True) as runtime:
        for _ in range(MAX_PENDING + 5):
            lz.sync.rms_norm(torch.ones(3, 8), backend="torch")
        series = runtime.counters.histograms.series(
            KERNEL_SECONDS, op="rms_norm", kernel="torch.rms_norm.native"
        )
        assert sum(series.counts) == MAX_PENDING and len(series.pending) == 5
        assert sum(series.snapshot()[0]) == MAX_PENDING + 5


def test_opentelemetry_has_the_same_numbers() -> None:
    """A reader of OpenTelemetry's finds counters, gauges and the parts of histograms, with their labels."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from layerzero.observe.otel_metrics import export_metrics

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    with lz.start(lz.Settings(device="cpu", warm="off", kernel_times=True), scoped=True) as runtime:
        lz.sync.rms_norm(torch.ones(3, 8))
        late = "layerzero_fallbacks_total"
        export_metrics(metrics.collector(runtime), [late], provider.get_meter("test"))
        for _ in range(2):
            lz.sync.rms_norm(torch.ones(3, 8))
        runtime.counters.add("fallbacks", kernel="a.rms_norm", reason="RuntimeError")
        data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    found: dict[str, Any] = {
        m.name: m.data for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics
    }
    (calls,) = found["layerzero_kernel_seconds_count"].data_points
    assert calls.value == 3 and dict(calls.attributes or {})["op"] == "rms_norm"
    assert found[late].data_points[0].value == 1
    assert "Gauge" in type(found["layerzero_batcher_in_flight"]).__name__


def test_a_forked_child_can_count() -> None:
    """Locks that another thread held when a process forked are made anew."""
    counters = Counters()
    series = counters.histograms.series("kernel_seconds", op="a")
    with series._lock:
        counters.histograms.renew_locks()
        held = series._lock.locked()
    series.observe(1.0)
    assert not held
    assert counters.histograms.count("kernel_seconds") == 1
