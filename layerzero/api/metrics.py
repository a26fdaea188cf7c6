"""What a runtime's batchers have counted, for a Prometheus registry."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from layerzero.calls.call_cache import remembered_calls
from layerzero.health.breaker import BreakerState
from layerzero.runtime import Runtime
from layerzero.scheduler.core.launch_reasons import CAUSES, REASONS

if TYPE_CHECKING:
    from layerzero.observe.counters import Collector

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_OUT = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.QUARANTINED)
_OUTCOMES = ("done", "failed", "cancelled", "expired", "rejected")


def collector(runtime: Runtime, prefix: str = "layerzero_") -> Collector:
    """A collector for a `prometheus_client` registry: batchers and counters are read when it is scraped.

    Every batcher family is labelled by device. `batcher_queue_wait_seconds` sums the time that launched calls
    queued; `batcher_batch_size` counts batches by their calls, `batcher_batches` by why they were launched,
    `batcher_hold_seconds` those that were held for callers; `batcher_calls` counts calls by how they
    ended; `batcher_in_flight` is what has been submitted and has not ended, `batcher_queued` what of it
    waits. `kernels_out` counts kernels that do not serve, `kv_pages` pages of all paged caches. The calls of
    `calls_remembered` are those of the process.
    """
    if not isinstance(runtime, Runtime):
        raise TypeError(f"runtime needs a Runtime, as lz.start() opens it, got {type(runtime).__name__}")
    return _BatcherCollector(runtime, prefix)


class _BatcherCollector:
    def __init__(self, runtime: Runtime, prefix: str) -> None:
        self._runtime = runtime
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            SummaryMetricFamily,
        )

        name, device = self._prefix + "batcher_", ["device"]
        wait = SummaryMetricFamily(name + "queue_wait_seconds", "time launched calls queued", labels=device)
        worst = GaugeMetricFamily(name + "queue_wait_max_seconds", "longest wait of a call", labels=device)
        sizes = HistogramMetricFamily(name + "batch_size", "calls in one batch", labels=device)
        why = "batches by why they were launched when they were"
        batches = CounterMetricFamily(name + "batches", why, labels=["device", "reason"])
        held_text = "time batches were held for callers"
        holds = SummaryMetricFamily(name + "hold_seconds", held_text, labels=["device", "cause"])
        items = CounterMetricFamily(name + "items", "calls submitted", labels=device)
        alone = "calls that few could join: never queued"
        at_once = CounterMetricFamily(name + "at_once", alone, labels=device)
        tokens = CounterMetricFamily(name + "tokens", "rows or tokens launched", labels=device)
        calls = CounterMetricFamily(name + "calls", "calls by how they ended", labels=["device", "outcome"])
        live = GaugeMetricFamily(name + "in_flight", "calls submitted and not ended", labels=device)
        queued = GaugeMetricFamily(name + "queued", "calls that wait for a batch", labels=device)
        out, by_state = "kernels by why they do not serve", ["device", "state"]
        kernels_out = GaugeMetricFamily(self._prefix + "kernels_out", out, labels=by_state)
        for where, local in list(self._runtime.devices.items()):
            labels, stats = [str(where)], local.loop_drivers.stats()
            launched = sum(size * count for size, count in stats.sizes.items())
            wait.add_metric(labels, count_value=launched, sum_value=stats.wait_s)
            worst.add_metric(labels, stats.wait_max_s)
            sizes.add_metric(labels, _buckets(stats.sizes), sum_value=launched)
            for reason in REASONS:
                batches.add_metric([*labels, reason], stats.reasons.get(reason, 0))
            for cause in CAUSES:
                count, seconds = stats.holds.get(cause, 0), stats.held_s.get(cause, 0.0)
                holds.add_metric([*labels, cause], count_value=count, sum_value=seconds)
            items.add_metric(labels, stats.submitted)
            at_once.add_metric(labels, stats.at_once)
            tokens.add_metric(labels, stats.tokens)
            for outcome in _OUTCOMES:
                calls.add_metric([*labels, outcome], getattr(stats, outcome))
            live.add_metric(labels, stats.submitted - stats.ended)
            drivers = list(local.loop_drivers.by_loop.values())
            queued.add_metric(labels, sum(driver.batcher.queued for driver in drivers))
            states = Counter(status.state for status in local.health.statuses())
            for state in _OUT:
                kernels_out.add_metric([*labels, state.value], states[state])
        pages = GaugeMetricFamily(self._prefix + "kv_pages", "pages of KV caches", labels=by_state)
        for name, (used, free) in _kv_pages().items():
            pages.add_metric([name, "used"], used)
            pages.add_metric([name, "free"], free)
        chosen_before = "calls whose kernel was chosen before"
        remembered = CounterMetricFamily(self._prefix + "calls_remembered", chosen_before, labels=["op"])
        for op_name, count in remembered_calls().items():
            if count:
                remembered.add_metric([op_name], count)
        yield from (wait, worst, sizes, batches, holds, items, at_once, tokens, calls, live, queued)
        yield from (kernels_out, pages, remembered)
        yield from self._runtime.counters.collector(self._prefix).collect()


def _kv_pages() -> dict[str, tuple[int, int]]:
    """Used and free pages of the paged caches of each device; nothing is imported where there is none."""
    module = sys.modules.get("layerzero.kvcache.paged_cache")
    totals: dict[str, tuple[int, int]] = {}
    for cache in [] if module is None else list(module.OPEN_CACHES):
        used, free = totals.get(str(cache.device), (0, 0))
        unowned = cache.allocator.free_pages
        totals[str(cache.device)] = used + cache.allocator.total - unowned, free + unowned
    return totals


def _buckets(sizes: dict[int, int]) -> list[tuple[str, float]]:
    """Batches of at most each bound, as Prometheus counts them."""
    bounds = (*BATCH_SIZES, float("inf"))
    counts = [0] * len(bounds)
    for size, count in sizes.items():
        counts[next(i for i, bound in enumerate(bounds) if size <= bound)] += count
    return [
        ("+Inf" if bound == float("inf") else f"{bound:.1f}", total)
        for bound, total in zip(bounds, accumulate(counts), strict=True)
    ]
