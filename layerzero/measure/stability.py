"""Whether two tunes of one machine name the same winners, and which differences noise explains.

Launched eagerly, a kernel waits for the host or for the device. The host of a shared machine changes its
speed from one second to the next, for all kernels that wait for it alike, and then another kernel wins. Such
tunes are compared at one speed of the host, that of the faster tune.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import msgspec

from layerzero.measure.timing import Timing
from layerzero.measure.tuner import TuningResult, tied_with
from layerzero.perfdb.record import Launch

# Launched eagerly a call that takes this many times its replay waits for the host.
_HOST_BOUND = 1.3
# So many kernels have to have waited for the host in both tunes before they say how fast it was.
_MIN_KERNELS = 2
# A call that waits for the device takes this share of its replay, and microseconds between two calls.
_SHARE, _GAP_US = 1.02, 1.5


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
            replayed = _geometric_means(
                first_by_call[call, "graph"].times_us, second_by_call[call, "graph"].times_us
            )
            host = host_ratio(tuned.times_us, other.times_us, replayed)
            tuned, other = _at_host_speed(tuned, 1 / host, replayed), _at_host_speed(other, host, replayed)
        outside = tuned.winner not in other.tied or other.winner not in tuned.tied
        differing.append(
            WinnerChange(
                call,
                launch,
                first_by_call[call, launch].winner,
                second_by_call[call, launch].winner,
                outside,
                round(host, 3),
            )
        )
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


def _geometric_means(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {kernel: math.sqrt(us * second[kernel]) for kernel, us in first.items() if kernel in second}
