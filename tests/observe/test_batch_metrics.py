"""What a scrape says of batches, holds and remembered calls: each counted once, by a fixed set of kinds."""

from __future__ import annotations

import asyncio

import pytest
import torch

import layerzero as lz
from layerzero.api import metrics
from layerzero.calls.call_cache import remembered_calls
from layerzero.native import FAST_PATH
from layerzero.scheduler.core.launch_reasons import CAUSES, REASONS

pytest.importorskip("prometheus_client")
X = torch.ones(3, 8)


def scraped(runtime: lz.Runtime) -> dict[tuple[str, ...], float]:
    """Every sample: its name and its label values, sorted by the labels' names."""
    return {
        (sample.name, *(text for _, text in sorted(sample.labels.items()))): sample.value
        for family in metrics.collector(runtime).collect()
        for sample in family.samples
    }


def test_every_kind_is_there_before_it_is_counted() -> None:
    """A rate over a series that begins with its first batch would miss that batch."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as runtime:
        runtime.device("cpu")
        samples = scraped(runtime)
    for reason in REASONS:
        assert samples["layerzero_batcher_batches_total", "cpu", reason] == 0
    for cause in CAUSES:
        assert samples["layerzero_batcher_hold_seconds_count", cause, "cpu"] == 0
        assert samples["layerzero_batcher_hold_seconds_sum", cause, "cpu"] == 0


@pytest.mark.asyncio
async def test_batches_are_counted_by_why_without_a_timeline() -> None:
    """Two of three calls fill a batch, one that shares nothing runs alone; reasons add up to batches."""
    async with lz.start(lz.Settings(inline_limit_us=0.0, max_batch_size=2), scoped=True) as runtime:
        await asyncio.gather(*(lz.rms_norm(X) for _ in range(3)))
        await asyncio.gather(*(lz.rms_norm(X, batching="off") for _ in range(2)))
        samples = scraped(runtime)
    by_reason = {reason: samples["layerzero_batcher_batches_total", "cpu", reason] for reason in REASONS}
    assert by_reason["limit"] >= 1 and by_reason["alone"] >= 2
    assert sum(by_reason.values()) == samples["layerzero_batcher_batch_size_count", "cpu"]


@pytest.mark.parametrize("compiled", [True, False])
def test_each_remembered_blocking_call_is_counted(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first, whoever answers; a call that raises in its checks is none."""
    cache = lz.sync.rms_norm.cache  # type: ignore[attr-defined]
    if compiled:
        if FAST_PATH.module is None:
            pytest.skip("nothing compiled is there")
    else:
        cache.install(None)
    try:
        with lz.start(lz.Settings(device="cpu", warm="off"), scoped=False) as runtime:
            before = remembered_calls()["rms_norm"]
            for _ in range(21):
                lz.sync.rms_norm(X)
            with pytest.raises(ValueError, match="weight"):
                lz.sync.rms_norm(X, torch.ones(5))
            assert remembered_calls()["rms_norm"] - before == 20
            assert scraped(runtime)["layerzero_calls_remembered_total", "rms_norm"] == before + 20
    finally:
        cache.install(FAST_PATH.module)
    assert remembered_calls()["rms_norm"] == before + 20  # what another twin has counted is kept


@pytest.mark.asyncio
@pytest.mark.parametrize("callers", [1, 4])
async def test_each_remembered_awaited_call_is_counted_once(callers: int) -> None:
    """Alone on its caller's thread, or in batches with others."""
    async with lz.start(lz.Settings(device="cpu", warm="off")):

        async def caller() -> None:
            for _ in range(10):
                await lz.rms_norm(X)

        await lz.rms_norm(X)
        before = remembered_calls()["rms_norm"]
        await asyncio.gather(*(caller() for _ in range(callers)))
        assert remembered_calls()["rms_norm"] - before == 10 * callers
