"""Counters that are exact under threads, and their text for Prometheus."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero._util.fork_safety import renew_after_fork
from layerzero.observe.histograms import MAX_SERIES, OVERFLOW, Histograms, label_values

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Series(msgspec.Struct, frozen=True, order=True):
    """One counter with one set of label values; `labels` are (name, value) pairs sorted by name."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


if TYPE_CHECKING:  # a protocol is hundreds of objects, and no first call waits for them
    from typing import Protocol

    class Collector(Protocol):
        """What a Prometheus registry scrapes."""

        def collect(self) -> Iterator[Any]: ...


class Counters:
    """Named counters with labels; no increment is ever lost, whatever the number of threads.

    One lock guards all of them, so `snapshot` is one consistent moment. A counter keeps the label names of
    its first use. Beyond `max_series` label sets, a counter's further ones are summed under "overflow", so
    that values from outside cannot grow memory without bound.
    """

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        if max_series < 1:
            raise ValueError(f"max_series needs at least 1, got {max_series}")
        self._max_series = max_series
        self._values: dict[Series, int | float] = {}
        self._labels: dict[str, tuple[str, ...]] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self.histograms = Histograms()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: a lock that another thread held would stay locked forever."""
        self._lock = threading.Lock()
        self.histograms.renew_locks()

    def __repr__(self) -> str:
        return f"<Counters {len(self._values)} series of {len(self._labels)} counters>"

    def __str__(self) -> str:
        lines = []
        for series, value in self.snapshot().items():
            labels = ", ".join(f"{name}={text}" for name, text in series.labels)
            lines.append(f"{series.name}{{{labels}}} {value:g}" if labels else f"{series.name} {value:g}")
        return "\n".join(lines) or "nothing was counted"

    def _repr_html_(self) -> str:
        from html import escape  # no first call waits for it

        return f"<pre>{escape(str(self))}</pre>"

    def add(self, counter: str, value: int | float = 1, /, **labels: object) -> None:
        """Add `value` to `counter` for these labels.

        Raises: ValueError: a negative value, a malformed name, or other labels than the counter's own.
        """
        if value < 0:
            raise ValueError(f"value of counter {counter} needs to be at least 0, got {value}")
        series = Series(counter, label_values(labels))
        with self._lock:
            current = self._values.get(series)
            if current is not None:
                self._values[series] = current + value
            else:
                admitted = self._admit(series)
                self._values[admitted] = self._values.get(admitted, 0) + value

    def get(self, counter: str, /, **labels: object) -> int | float:
        """The value for exactly these labels; 0 if nothing was ever added."""
        series = Series(counter, label_values(labels))
        with self._lock:
            return self._values.get(series, 0)

    def total(self, counter: str) -> int | float:
        """The sum over all label values of `counter`."""
        with self._lock:
            return sum(value for series, value in self._values.items() if series.name == counter)

    def snapshot(self) -> dict[Series, int | float]:
        """Every value at one moment, sorted by name and labels."""
        with self._lock:
            values = dict(self._values)
        return dict(sorted(values.items()))

    def collector(self, prefix: str = "layerzero_") -> Collector:
        """A collector for a `prometheus_client` registry: values are read when it is scraped."""
        return _Collector(self, prefix)

    def _admit(self, series: Series) -> Series:
        names = tuple(name for name, _ in series.labels)
        label_names = self._labels.get(series.name)
        if label_names is None:
            for word in (series.name, *names):
                if not _NAME.fullmatch(word):
                    raise ValueError(f"counter and label names need lower snake case, got {word!r}")
            self._labels[series.name] = names
        elif label_names != names:
            raise ValueError(f"counter {series.name} has labels {list(label_names)}, got {list(names)}")
        count = self._counts.get(series.name, 0)
        if count >= self._max_series:
            return Series(series.name, tuple((name, OVERFLOW) for name in names))
        self._counts[series.name] = count + 1
        return series


class _Collector:
    def __init__(self, counters: Counters, prefix: str) -> None:
        self._counters = counters
        self._prefix = prefix

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        families: dict[str, Any] = {}
        for series, value in self._counters.snapshot().items():
            family = families.get(series.name)
            if family is None:
                family = families[series.name] = CounterMetricFamily(
                    self._prefix + series.name,
                    series.name.replace("_", " "),
                    labels=[name for name, _ in series.labels],
                )
            family.add_metric([text for _, text in series.labels], value)
        yield from families.values()
        yield from self._counters.histograms.collect(self._prefix)
