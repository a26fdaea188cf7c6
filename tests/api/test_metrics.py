"""What Prometheus scrapes of a runtime's lanes."""

from __future__ import annotations

import asyncio

import pytest
import torch

import layerzero as lz

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="it is not installed: pip install 'layerzero-runtime[serve]'"
)
metrics = pytest.importorskip("layerzero.api.metrics", reason="it needs prometheus_client")


@pytest.mark.asyncio
async def test_a_scrape_tells_what_the_lane_did() -> None:
    """Calls, tokens, batches by size, waiting and endings are those of the batcher's own counters."""
    async with lz.start(lz.Settings(device="cpu", inference=True)) as runtime:
        registry = prometheus_client.CollectorRegistry()
        registry.register(metrics.collector(runtime, prefix="lz_"))
        assert registry.get_sample_value("lz_batcher_items_total", {"device": "cpu"}) is None
        weight = torch.ones(8)
        await asyncio.gather(*(lz.rms_norm(torch.ones(3, 8), weight) for _ in range(5)))
        late = asyncio.ensure_future(lz.rms_norm(torch.ones(3, 8), weight))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        stats = runtime.device("cpu").loop_drivers.stats()

        def value(name: str, **labels: str) -> float | None:
            found: float | None = registry.get_sample_value(f"lz_batcher_{name}", {"device": "cpu", **labels})
            return found

        assert value("items_total") == stats.submitted == 6
        assert value("tokens_total") == stats.tokens == 15
        assert value("batch_size_count") == stats.batches
        assert value("batch_size_sum") == value("queue_wait_seconds_count") == 5
        assert value("batch_size_bucket", le="4.0") == 0
        assert value("batch_size_bucket", le="8.0") == value("batch_size_bucket", le="+Inf") == 1
        assert value("queue_wait_seconds_sum") == stats.wait_s
        assert value("queue_wait_max_seconds") == stats.wait_max_s
        assert value("in_flight") == 0
        outcomes = {"done": 5, "failed": 0, "cancelled": 1, "expired": 0, "rejected": 0}
        assert {name: value("calls_total", outcome=name) for name in outcomes} == outcomes
        assert registry.get_sample_value("lz_selections_total", {"op": "rms_norm"}) is not None


def test_batches_beyond_the_largest_bound_are_counted() -> None:
    """A batch of any size is in the last bucket."""
    assert metrics._buckets({1: 2, 3: 1, 1000: 4})[-1] == ("+Inf", 7)
    assert metrics._buckets({1: 2, 3: 1, 1000: 4})[:3] == [("1.0", 2), ("2.0", 2), ("4.0", 3)]


def test_what_is_no_runtime_is_told_at_once() -> None:
    """Not at the first scrape, in a server's thread."""
    with pytest.raises(TypeError, match=r"runtime needs a Runtime, as lz\.start\(\) opens it, got int"):
        lz.metrics.collector(3)  # type: ignore[arg-type]
