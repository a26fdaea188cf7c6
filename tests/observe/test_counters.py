"""Counters: exact under threads, bounded in labels, readable by Prometheus."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import pytest

from layerzero.observe.counters import Counters, Series
from layerzero.observe.histograms import OVERFLOW


class Slow(dict[Any, Any]):
    """Values whose reader is interrupted: what reads and writes apart loses counts."""

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        if next(_TURNS) % 64 == 0:
            time.sleep(0)
        return found


_TURNS = itertools.count()


def test_sums_are_exact_under_sixteen_threads() -> None:
    """16 threads x 5,000 increments of shared and own series lose nothing (CS-027)."""
    counters = Counters()
    counters._values = Slow()
    start = threading.Barrier(16)

    def work(number: int) -> None:
        start.wait()
        for _ in range(5_000):
            counters.add("hits")
            counters.add("fallbacks", 2, kernel=f"k{number % 4}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("hits") == 80_000
    assert counters.total("fallbacks") == 160_000
    assert [counters.get("fallbacks", kernel=f"k{n}") for n in range(4)] == [40_000] * 4


def test_a_snapshot_is_sorted_and_detached() -> None:
    """A snapshot lists every series in order and does not move afterwards."""
    counters = Counters()
    counters.add("b", op="y")
    counters.add("b", op="x")
    counters.add("a", 0.5)
    snapshot = counters.snapshot()
    counters.add("a")
    assert snapshot == {Series("a"): 0.5, Series("b", (("op", "x"),)): 1, Series("b", (("op", "y"),)): 1}
    assert list(snapshot) == sorted(snapshot)


def test_label_values_are_bounded() -> None:
    """Beyond the limit the sums go on under one label, and nothing is lost."""
    counters = Counters(max_series=3)
    for number in range(10):
        counters.add("seen", key=number)
    assert len(counters.snapshot()) == 4
    assert counters.get("seen", key=OVERFLOW) == 7 and counters.total("seen") == 10


class Yielding(dict[Series, int | float]):
    """Values that let every other thread run between being read and being written."""

    def get(self, series: Series, default: int | float | None = None) -> int | float | None:  # type: ignore[override]
        value = super().get(series, default)
        threading.Event().wait(0.0001)
        return value


class NoLock:
    """The guard, removed."""

    def __enter__(self) -> None: ...

    def __exit__(self, *details: object) -> None: ...


def counted(counters: Counters) -> int | float:
    """What is left of 8 threads x 50 increments, with a switch forced inside each."""
    counters.add("hits")
    counters._values = Yielding(counters._values)

    def work() -> None:
        for _ in range(50):
            counters.add("hits")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counters.total("hits") - 1


def test_a_switch_inside_an_increment_loses_nothing() -> None:
    """However the threads interleave, every increment counts; without the lock the same check fails."""
    assert counted(Counters()) == 400
    unguarded = Counters()
    unguarded._lock = NoLock()  # type: ignore[assignment]
    assert counted(unguarded) < 400


@pytest.mark.parametrize(
    ("name", "value", "labels", "needs"),
    [
        ("hits", -1, {}, "at least 0"),
        ("Hits", 1, {}, "lower snake case"),
        ("hits", 1, {"Kernel": 1}, "lower snake case"),
        ("known", 1, {"other": 1}, "has labels"),
    ],
)
def test_a_wrong_increment_is_refused_and_changes_nothing(
    name: str, value: int, labels: dict[str, object], needs: str
) -> None:
    """Negative values, bad names and other labels raise, and no value moves."""
    counters = Counters()
    counters.add("known", kernel="a")
    before = counters.snapshot()
    with pytest.raises(ValueError, match=needs):
        counters.add(name, value, **labels)
    assert counters.snapshot() == before


def test_a_bound_below_one_is_refused() -> None:
    """A registry without room for any series is a mistake."""
    with pytest.raises(ValueError, match="max_series needs at least 1"):
        Counters(max_series=0)


def test_exposition_is_parsed_back_by_prometheus() -> None:
    """The text holds every value with its labels, escaped; prometheus_client's own parser reads it."""
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    counters = Counters()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(counters.collector())
    counters.add("fallbacks", 3, kernel='a"b\\c\nd')
    counters.add("hits", 41)
    counters.add("hits")
    samples = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples == {
        ("layerzero_fallbacks_total", (("kernel", 'a"b\\c\nd'),)): 3.0,
        ("layerzero_hits_total", ()): 42.0,
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_can_count() -> None:
    """A lock held by another thread at the moment of fork does not hang the child."""
    counters = Counters()
    with counters._lock:
        child = os.fork()
        if child == 0:
            counters.add("alive")
            os._exit(0 if counters.get("alive") == 1 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
