"""A kernel's latency over ideal time: a floor that a call never beats, and a multiple of the roofline.

The floor is what launching costs (the host's share where calls are launched eagerly), the multiple what the
kernel makes of the machine once sizes are large. Both come from that kernel's own measurements, so a size
that was not measured is priced in the regime it belongs to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

# Where the floor may be among a kernel's times, as shares of them from the smallest; few, to stay cheap.
_FLOOR_QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
_FLOOR_MARGINS = (1.0, 0.8)
# A time this much above the floor speaks of the machine, not of the launch.
_ABOVE_FLOOR = 1.25
_DEFAULT_MULTIPLE = 1.5
# So many points tell a floor from a multiple.
MIN_POINTS = 4


class LatencyModel(msgspec.Struct, frozen=True):
    """`us(ideal)` = sqrt(floor^2 + (multiple * ideal)^2), microseconds; fitted to `point_count` points."""

    floor_us: float
    multiple: float
    point_count: int = 0
    source: str = ""

    def us(self, ideal_us: float) -> float:
        """The expected time where the roofline alone would need `ideal_us`."""
        return math.hypot(self.floor_us, self.multiple * ideal_us)


def fit(
    points: Sequence[tuple[float, float]], source: str = "", highest_us: float = math.inf
) -> LatencyModel:
    """The curve with the least mean error, in logs, over (ideal, measured) microseconds.

    Few points do not tell a floor from the size that they were measured at: no floor lies above
    `highest_us` then, what the kernels that are known better need at least.
    """
    times = sorted(us for _, us in points)
    if len(points) < MIN_POINTS:
        floor = min(times[0] * _FLOOR_MARGINS[-1], highest_us)
        multiples = [math.sqrt(us * us - floor * floor) / ideal for ideal, us in points]
        return LatencyModel(floor, statistics.median(multiples), len(points), source)
    best: tuple[float, LatencyModel] | None = None
    for candidate in sorted({times[int((len(times) - 1) * share)] for share in _FLOOR_QUANTILES}):
        for margin in _FLOOR_MARGINS:
            floor = candidate * margin
            multiples = [
                math.sqrt(us * us - floor * floor) / ideal
                for ideal, us in points
                if us > _ABOVE_FLOOR * floor
            ]
            model = LatencyModel(
                floor,
                statistics.median(multiples) if len(multiples) > 1 else _DEFAULT_MULTIPLE,
                len(points),
                source,
            )
            error = sum(abs(math.log(us / model.us(ideal))) for ideal, us in points)
            if best is None or error < best[0]:
                best = (error, model)
    assert best is not None
    return best[1]
