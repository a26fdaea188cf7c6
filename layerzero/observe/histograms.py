"""Histograms with fixed bounds, exact under threads: how long selections and kernels take."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

# Seconds: from a remembered kernel's call to a compiler's run.
SECONDS: Final = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
MAX_SERIES: Final = 1000
MAX_PENDING: Final = 512  # durations that wait to be counted
OVERFLOW: Final = "overflow"


def label_values(labels: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Labels as the key of a series: (name, text) pairs sorted by name."""
    return tuple(sorted((name, str(text)) for name, text in labels.items()))


class HistogramSeries:
    """One histogram with one set of label values.

    A duration is appended to `pending`, which needs no lock, and counted with many others: a call that pays
    for a lock and a search waits longer for them than for the clock. `counts` and `sum` are behind by those.
    """

    __slots__ = ("_lock", "counts", "pending", "sum")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0
        self.pending: list[float] = []

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.pending.append(seconds)
        if len(self.pending) >= MAX_PENDING:
            self.fold()

    def fold(self) -> None:
        """Count what is pending, unless another thread does, or the very call that a finalizer interrupts."""
        if self._lock.acquire(blocking=False):
            try:
                self._count_pending()
            finally:
                self._lock.release()

    def _count_pending(self) -> None:
        many = len(self.pending)  # other threads append behind these
        seconds = sorted(self.pending[:many])
        del self.pending[:many]
        shorter = 0
        for place, bound in enumerate(SECONDS):
            at_most = bisect_right(seconds, bound)
            self.counts[place] += at_most - shorter
            shorter = at_most
        self.counts[-1] += many - shorter
        self.sum += sum(seconds)

    def snapshot(self) -> tuple[list[int], float]:
        """The counts by bound, not added up, and the sum, of one moment."""
        with self._lock:
            self._count_pending()
            return list(self.counts), self.sum

    def renew_lock(self) -> None:
        """Make the lock anew, in a forked child whose parent's other threads may have held it."""
        self._lock = threading.Lock()


class Histograms:
    """Histograms by name and label values; what comes beyond `MAX_SERIES` of a name is summed in one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, dict[tuple[tuple[str, str], ...], HistogramSeries]] = {}

    def series(self, name: str, /, **labels: object) -> HistogramSeries:
        """The series for these labels; keep it where it is observed often."""
        key = label_values(labels)
        with self._lock:
            of_name = self._series.setdefault(name, {})
            if key not in of_name and len(of_name) >= MAX_SERIES:
                key = tuple((label, OVERFLOW) for label, _ in key)
            return of_name.setdefault(key, HistogramSeries())

    def count(self, name: str) -> int:
        """How many durations of all labels were observed."""
        return sum(sum(series.snapshot()[0]) for _, series in self._named(name))

    def _named(self, name: str) -> list[tuple[tuple[tuple[str, str], ...], HistogramSeries]]:
        with self._lock:
            return list(self._series.get(name, {}).items())

    def collect(self, prefix: str) -> Iterator[Any]:
        """Metric families for a Prometheus registry."""
        from prometheus_client.core import HistogramMetricFamily

        with self._lock:
            names = list(self._series)
        for name in names:
            series = self._named(name)
            labels = [label for label, _ in series[0][0]]
            family = HistogramMetricFamily(prefix + name, name.replace("_", " "), labels=labels)
            for key, one in series:
                counts, total = one.snapshot()
                bounds = [*map(str, SECONDS), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
                family.add_metric([text for _, text in key], buckets, sum_value=total)
            yield family

    def renew_locks(self) -> None:
        """Make every lock anew, in a forked child."""
        self._lock = threading.Lock()
        for of_name in self._series.values():
            for series in of_name.values():
                series.renew_lock()
