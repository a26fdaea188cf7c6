"""What was measured, compared: kernels head to head, two tunes of a machine, calls that no row covers.

Launched eagerly, a kernel waits for the host or for the device. The host of a shared machine changes its
speed from one second to the next, for all kernels that wait for it alike, and then another kernel wins. Two
tunes are compared at one speed of the host, that of the faster tune.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from layerzero.measure.timing import Timing
from layerzero.measure.tuner import TuningResult, tied_with
from layerzero.perfdb.record import BenchmarkCase, Launch, Measurement, implausible_reason

# Launched eagerly a call that takes this many times its replay waits for the host.
_HOST_BOUND = 1.3
# So many kernels have to have waited for the host in both tunes before they say how fast it was.
_MIN_KERNELS = 2
# A call that waits for the device takes this share of its replay, and microseconds between two calls.
_SHARE, _GAP_US = 1.02, 1.5
# Where a call's measurement is stored, and the kernels that take the call.
CallToCover = tuple[BenchmarkCase, Collection[str]]


class ComparedKernel(msgspec.Struct, frozen=True):
    """One side: microseconds a call, their variance, and how many times the winner's time it takes."""

    name: str
    median_us: float
    p95_us: float
    p99_us: float
    variance: float
    samples: int
    times_winner: float
    tied: bool


class KernelComparison(msgspec.Struct, frozen=True):
    """A comparison, the fastest first; `speedup` is the winner's over `baseline`, 1.0 where that is itself.

    A contender is tied where its median is within the tie band of the winner's, or its lower quartile
    below the winner's upper one: then another run may name another winner.
    """

    contenders: tuple[ComparedKernel, ...]
    baseline: str
    speedup: float
    failed: dict[str, str] = {}

    @property
    def winner(self) -> str:
        """The fastest by median."""
        return self.contenders[0].name


def head_to_head(
    timings: dict[str, Timing],
    baseline: str = "",
    *,
    tie_band: float = 0.03,
    failed: dict[str, str] | None = None,
) -> KernelComparison:
    """Compare timings; the baseline defaults to the slowest.

    Raises: ValueError: there is nothing to compare, or `baseline` was not timed.
    """
    if not timings:
        raise ValueError(f"timings needs at least one that could be taken, got {failed or 'none'}")
    ordered = sorted(timings, key=lambda name: timings[name].median_us)
    best = timings[ordered[0]]
    baseline_name = baseline or ordered[-1]
    if baseline_name not in timings:
        raise ValueError(f"baseline needs one of {', '.join(ordered)}, got {baseline_name!r}")
    contenders = tuple(
        ComparedKernel(
            name,
            timing.median_us,
            timing.quantile_us(0.95),
            timing.quantile_us(0.99),
            timing.variance,
            len(timing.samples),
            timing.median_us / best.median_us,
            timing.median_us <= best.median_us * (1 + tie_band)
            or timing.quantile_us(0.25) < best.quantile_us(0.75),
        )
        for name in ordered
        if (timing := timings[name])
    )
    return KernelComparison(
        contenders, baseline_name, timings[baseline_name].median_us / best.median_us, failed or {}
    )


class WinnerChange(msgspec.Struct, frozen=True):
    """Two winners of one call; `outside` where one of them was clearly beaten in the other's tune.

    `host` is how many times as long the host took in the second tune, by the kernels that waited for it.
    """

    call: str
    launch: Launch
    first: str
    second: str
    outside: bool
    host: float = 1.0


def winner_changes(
    first: Iterable[TuningResult], second: Iterable[TuningResult]
) -> tuple[int, tuple[WinnerChange, ...]]:
    """Of two tunes of one machine: how many calls were compared, and those whose winners differ."""
    first_by_call: dict[tuple[str, Launch], TuningResult] = {(t.call, t.launch): t for t in first}
    second_by_call = {(t.call, t.launch): t for t in second}
    compared, differing = 0, []
    for (call, launch), tuned in first_by_call.items():
        other = second_by_call.get((call, launch))
        if other is None or not tuned.winner or not other.winner:
            continue
        compared += 1
        if tuned.winner == other.winner:
            continue
        host = 1.0
        if launch == "eager" and (call, "graph") in first_by_call and (call, "graph") in second_by_call:
            once, again = first_by_call[call, "graph"].times_us, second_by_call[call, "graph"].times_us
            replayed = {
                kernel: math.sqrt(us * again[kernel]) for kernel, us in once.items() if kernel in again
            }
            host = host_ratio(tuned.times_us, other.times_us, replayed)
            tuned, other = _at_host_speed(tuned, 1 / host, replayed), _at_host_speed(other, host, replayed)
        outside = tuned.winner not in other.tied or other.winner not in tuned.tied
        winners = (first_by_call[call, launch].winner, second_by_call[call, launch].winner)
        differing.append(WinnerChange(call, launch, *winners, outside, round(host, 3)))
    return compared, tuple(differing)


def host_ratio(
    first: Mapping[str, float], second: Mapping[str, float], replayed: Mapping[str, float]
) -> float:
    """How many times as long the host took in the second tune; 1.0 where too few kernels waited for it."""
    waited = [
        math.log(second[kernel] / us)
        for kernel, us in first.items()
        if kernel in second and min(us, second[kernel]) > _HOST_BOUND * replayed.get(kernel, math.inf)
    ]
    return math.exp(statistics.median(waited)) if len(waited) >= _MIN_KERNELS else 1.0


def _at_host_speed(tuned: TuningResult, slower: float, replayed: Mapping[str, float]) -> TuningResult:
    """The tune as it would have been with a host `slower` times as fast; itself where that is not faster."""
    if slower <= 1.0:
        return tuned
    timings = {}
    for kernel, timing in tuned.timings.items():
        floor_us = _SHARE * replayed[kernel] + _GAP_US if kernel in replayed else math.inf
        samples = tuple(min(us, max(us / slower, floor_us)) for us in timing.samples)
        timings[kernel] = Timing(samples, timing.cache)
    best = min(timings, key=lambda kernel: timings[kernel].median_us)
    return msgspec.structs.replace(
        tuned, winner=best, timings=timings, tied=tied_with(best, timings, tuned.band)
    )


def find_uncovered(calls: Sequence[CallToCover], rows: Iterable[Measurement]) -> list[bool]:
    """For each call whether it is to be measured: no row counts, or a kernel that takes it came later.

    A kernel without a time of a case came later where its first time of the op is newer than all of the
    case's: one that was there already was refused, and would be again. A kernel that has no time of the op at
    all makes one call miss, so that one that fails everywhere does not have everything measured again.
    """
    kernels_by_case: dict[BenchmarkCase, set[str]] = {}
    latest: dict[BenchmarkCase, int] = {}
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        if implausible_reason(row):
            continue  # it does not count, so the call is measured again
        # A kernel that casts has its row under the type that it computes in.
        case = msgspec.structs.replace(row.case, dtype="")
        kernels_by_case.setdefault(case, set()).add(row.kernel)
        latest[case] = max(latest.get(case, 0), row.timestamp)
        op_kernel = (row.case.op, row.kernel)
        first[op_kernel] = min(first.get(op_kernel, math.inf), row.timestamp)
    probed: set[tuple[str, str]] = set()
    missing = []
    for call_case, eligible in calls:
        case = msgspec.structs.replace(call_case, dtype="")
        untimed = {
            (call_case.op, k) for k in eligible if case in kernels_by_case and k not in kernels_by_case[case]
        }
        never_timed = {k for k in untimed if k not in first} - probed
        probed |= never_timed
        added_later = any(first[k] > latest[case] for k in untimed if k in first)
        missing.append(case not in kernels_by_case or added_later or bool(never_timed))
    return missing
