"""Kernels head to head: what each takes, who wins by how much, and whether that is more than noise."""

from __future__ import annotations

import msgspec

from layerzero.measure.timing import Timing


class Contender(msgspec.Struct, frozen=True):
    """One side: microseconds a call, their variance, and how many times the winner's time it takes."""

    name: str
    median_us: float
    p95_us: float
    p99_us: float
    variance: float
    samples: int
    times_winner: float
    tied: bool


class HeadToHead(msgspec.Struct, frozen=True):
    """A comparison, the fastest first; `speedup` is the winner's over `baseline`, 1.0 where that is itself.

    A contender is tied where its median is within the tie band of the winner's, or its lower quartile
    below the winner's upper one: then another run may name another winner.
    """

    contenders: tuple[Contender, ...]
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
) -> HeadToHead:
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
        Contender(
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
    return HeadToHead(
        contenders, baseline_name, timings[baseline_name].median_us / best.median_us, failed or {}
    )
