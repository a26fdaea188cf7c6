"""Batches, waits and an excerpt: out of a trace and out of this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

import layerzero as lz
from layerzero.observe.trace_files import StoredTrace
from layerzero.report import traffic
from layerzero.report.document import OpTraffic
from layerzero.report.traffic import excerpt_of, traffic_of_runtime, traffic_of_trace


def recorded(path: Path) -> tuple[StoredTrace, list[OpTraffic]]:
    """The trace of a program whose callers meet, and what its process counted."""

    async def work() -> list[OpTraffic]:
        async with lz.start(lz.Settings(device="cpu"), scoped=True) as runtime:
            for _ in range(3):
                await asyncio.gather(*(lz.rms_norm(torch.ones(1, 8)) for _ in range(5)))
            return traffic_of_runtime(runtime)

    with lz.timeline(path):
        counted = asyncio.run(work())
    return StoredTrace(path), counted


def test_a_trace_and_the_process_count_the_same_batches(tmp_path: Path) -> None:
    """Batches by their calls, with waits; the trace adds the op and why each was launched then."""
    trace, (counted,) = recorded(tmp_path / "trace.json")
    (of_op,) = traffic_of_trace(trace)
    assert (of_op.name, of_op.source, of_op.calls) == ("rms_norm", "trace.json", 15)
    assert (counted.name, counted.calls, counted.sizes) == ("cpu", 15, of_op.sizes)
    assert sum(int(size) * count for size, count in of_op.sizes) == 15
    assert sum(count for _, count in of_op.whys) == of_op.batches == counted.batches
    assert of_op.mean_wait_ms is not None and of_op.max_wait_ms is not None and of_op.p95_wait_ms is not None
    assert 0 <= of_op.mean_wait_ms <= of_op.max_wait_ms
    assert of_op.p95_wait_ms <= of_op.max_wait_ms


def test_an_excerpt_is_around_the_largest_batch(tmp_path: Path, monkeypatch: object) -> None:
    """All slices where they are few; where they are many, the nearest, and how many are left out."""
    trace, _ = recorded(tmp_path / "trace.json")
    whole = excerpt_of(trace)
    slices = [each for row in whole.rows for each in row.slices]
    total = sum(event["ph"] == "X" for event in trace.events)
    assert (len(slices), whole.left_out) == (total, 0)
    assert any(row.name.startswith("batches of") for row in whole.rows)
    assert all(
        whole.begin_us <= begin and begin + length <= whole.end_us + 0.2 for begin, length, *_ in slices
    )
    assert all(0 <= place < len(whole.texts) for each in slices for place in each[2:])
    monkeypatch.setattr(traffic, "MAX_SLICES", 4)  # type: ignore[attr-defined]
    few = excerpt_of(trace)
    assert (sum(len(row.slices) for row in few.rows), few.left_out) == (4, total - 4)


def test_a_process_that_ran_nothing_has_no_traffic() -> None:
    """A device without a batch has no row."""
    with lz.start(lz.Settings(device="cpu"), scoped=True) as runtime:
        runtime.device()
        assert traffic_of_runtime(runtime) == []
