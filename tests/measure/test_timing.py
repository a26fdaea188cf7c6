"""Timing and comparing: quantiles are those of the samples, and the slower callable loses."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from layerzero.measure.compare import head_to_head
from layerzero.measure.timing import Timing, TimingBudget, copies_for, time_kernels
from layerzero.perfdb import BenchmarkCase, Measurement, implausible_reason
from layerzero.perfdb.record import FEW_SAMPLES, LONG_US

CPU = torch.device("cpu")
X = (torch.ones(8),)


class Ticks:
    """A clock that only kernels move."""

    ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns

    def perf_counter(self) -> float:
        return self.ns / 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """The clock that kernels are timed by: beside busy neighbours real ones take any time."""
    ticks = Ticks()
    monkeypatch.setattr("layerzero.measure.timing.time", ticks)
    return ticks


def timing(*samples: float) -> Timing:
    return Timing(tuple(sorted(samples)), "warm")


def test_quantiles_are_those_of_the_samples() -> None:
    """Median, p95 and p99 of 1 to 1000; the variance leaves a quarter on each side out."""
    made = timing(*[float(n) for n in range(1, 1001)])
    assert made.median_us == 500.5
    assert (made.quantile_us(0.95), made.quantile_us(0.99)) == (951.0, 991.0)
    assert made.variance == pytest.approx((500**2 - 1) / 12)
    assert timing(*[5.0] * 8, 4000.0, 5000.0).variance == 0.0


def test_a_row_launched_by_the_host_is_long_enough_to_overlap_host_and_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two kernels that the host needs longest for measure alike, whatever the device needs in its shadow."""
    host, device = 60.0, {"short": 5.0, "long": 55.0}

    def events(arm: Any) -> float:
        own = device[arm.run()]
        calls: int = arm.calls
        return (host + own + (calls - 1) * max(host, own)) / calls

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(L2_cache_size=1 << 20)
    )
    monkeypatch.setattr("layerzero.measure.timing._time_with_events", events)
    runs: dict[str, Callable[..., Any]] = {"short": lambda: "short", "long": lambda: "long"}
    found, failed = time_kernels(runs, [()], torch.device("cuda"), "eager", TimingBudget(samples=5))
    assert not failed and found["short"].median_us == pytest.approx(host, rel=0.05)
    assert found["long"].median_us == pytest.approx(found["short"].median_us, rel=0.05)


def test_a_deliberately_slower_callable_loses(clock: Ticks) -> None:
    """Three fold work is measured as slower, with a speed-up and no tie."""

    def busy(us: float) -> None:
        clock.ns += int(us * 1000)

    found, failed = time_kernels(
        {"slow": lambda _: busy(600.0), "quick": lambda _: busy(200.0)},
        [X],
        CPU,
        "eager",
        TimingBudget(samples=7),
    )
    duel = head_to_head(found, "slow")
    assert not failed and duel.winner == "quick" and duel.speedup > 2
    assert [c.tied for c in duel.contenders] == [True, False]


def test_what_cannot_run_is_told_and_the_others_go_on() -> None:
    """A kernel that raises is named with its error; it is in no comparison."""

    def broken(_: torch.Tensor) -> None:
        raise RuntimeError("no such instruction")

    found, failed = time_kernels(
        {"broken": broken, "fine": torch.sin}, [X], CPU, "eager", TimingBudget(samples=5)
    )
    assert list(found) == ["fine"] and failed == {"broken": "RuntimeError: no such instruction"}
    assert len(found["fine"].samples) == 5


def test_the_hopeless_get_the_fewest_samples_that_count(clock: Ticks) -> None:
    """A kernel many times slower than the best does not eat the budget of the others."""

    def taking(us: float) -> Callable[..., None]:
        def run(_: torch.Tensor) -> None:
            clock.ns += int(us * 1000)

        return run

    runs = {"a": taking(200.0), "b": taking(10_000.0)}
    found, _ = time_kernels(runs, [X], CPU, "eager", TimingBudget(samples=12, budget_s=9.0))
    assert (len(found["a"].samples), len(found["b"].samples)) == (12, 5)


def test_a_long_call_is_run_no_more_than_its_row_needs(clock: Ticks) -> None:
    """A call of 110 ms beside a quick one runs three times, the first uncounted; its row counts."""
    runs: list[int] = []

    def slow(_: torch.Tensor) -> None:
        runs.append(len(runs))
        clock.ns += 300_000_000 if len(runs) == 1 else 110_000_000

    def quick(_: torch.Tensor) -> None:
        clock.ns += 10_000

    found, _ = time_kernels({"a": quick, "b": slow}, [X], CPU, "eager", TimingBudget(samples=7))
    assert len(runs) == 3 and len(found["b"].samples) == FEW_SAMPLES
    assert LONG_US < found["b"].median_us < 250_000.0, "the first is not counted"
    row = Measurement(
        case=BenchmarkCase(op="linear", dtype="float32"), kernel="b", median_us=found["b"].median_us,
        p95_us=found["b"].quantile_us(0.95), variance=found["b"].variance, samples=FEW_SAMPLES,
    )  # fmt: skip
    assert (
        implausible_reason(row) == ""
        and implausible_reason(msgspec.structs.replace(row, median_us=99_000.0)) != ""
    )


def test_who_cannot_be_told_apart_is_sampled_longer(clock: Ticks) -> None:
    """A restless kernel around a steady one gets more samples, as does that one; a clear loser does not."""
    draw = random.Random(3)

    def taking(*us: float) -> Callable[..., None]:
        def run(_: torch.Tensor) -> None:
            clock.ns += int(draw.choice(us) * 1000)

        return run

    effort = TimingBudget(samples=15, sample_us=1.0, budget_s=9.0)
    runs = {"steady": taking(100.0), "restless": taking(60.0, 160.0, 170.0), "slow": taking(300.0)}
    found, _ = time_kernels(runs, [X], CPU, "eager", effort)
    assert len(found["slow"].samples) == 15
    assert len(found["steady"].samples) == len(found["restless"].samples) > 15
    equal, _ = time_kernels({"a": taking(100.0), "b": taking(101.0)}, [X], CPU, "eager", effort)
    assert [len(t.samples) for t in equal.values()] == [15, 15]


def test_nothing_to_compare_is_an_error() -> None:
    """An empty comparison, and a baseline that was not timed, are refused by name."""
    with pytest.raises(ValueError, match="timings needs at least one"):
        head_to_head({})
    with pytest.raises(ValueError, match="baseline needs one of a"):
        head_to_head({"a": timing(1.0)}, "b")


def test_a_comparison_carries_every_quantile() -> None:
    """Each contender has its own samples' median, p95, p99, variance and count, and its share of the best."""
    quick, slow = timing(*range(1, 1001)), timing(*range(2001, 3001))
    duel = head_to_head({"slow": slow, "quick": quick})
    assert [c.name for c in duel.contenders] == ["quick", "slow"]
    for contender, own in zip(duel.contenders, (quick, slow), strict=True):
        assert (contender.median_us, contender.p95_us, contender.p99_us) == (
            own.median_us,
            own.quantile_us(0.95),
            own.quantile_us(0.99),
        )
        assert contender.median_us < contender.p95_us < contender.p99_us
        assert contender.variance == own.variance > 0 and contender.samples == 1000
        assert contender.times_winner == own.median_us / quick.median_us


def test_a_tie_is_called_one() -> None:
    """Inside the band, or with overlapping quartiles, nobody is a clear loser."""
    near = head_to_head({"a": timing(10, 10, 10), "b": timing(10.2, 10.2, 10.2)})
    overlapping = head_to_head({"a": timing(5, 10, 15), "b": timing(6, 11.5, 16)})
    apart = head_to_head({"a": timing(10, 10, 10), "b": timing(11, 11, 11)})
    assert [d.contenders[1].tied for d in (near, overlapping, apart)] == [True, True, False]


def test_one_copy_does_on_a_cpu() -> None:
    """Only a GPU's cache is overflowed on purpose."""
    assert copies_for(1 << 20, CPU) == 1
