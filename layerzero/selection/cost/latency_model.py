"""A kernel's time as a curve over ideal time: a floor that a call never beats, and a multiple of the roofs.

The floor is what launching costs (the host's share where calls are launched eagerly), the multiple what the
kernel makes of the machine once sizes are large. Both come from that kernel's own measurements, so a size
that nobody measured is priced in the regime it belongs to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

# Where the floor may lie among a kernel's times, as shares of them from the smallest; few, to stay cheap.
_FLOORS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
_BELOW = (1.0, 0.8)
# A time this much above the floor speaks of the machine, not of the launch.
_ABOVE = 1.25
_USUAL = 1.5
# So many points tell a floor from a multiple.
ENOUGH = 4


class Curve(msgspec.Struct, frozen=True):
    """`us(ideal)` = sqrt(floor^2 + (multiple * ideal)^2), microseconds; fitted to so many `places`."""

    floor_us: float
    multiple: float
    places: int = 0
    source: str = ""

    def us(self, ideal_us: float) -> float:
        """The expected time where the roofs alone would need `ideal_us`."""
        return math.hypot(self.floor_us, self.multiple * ideal_us)


def fitted(points: Sequence[tuple[float, float]], source: str = "", highest_us: float = math.inf) -> Curve:
    """The curve with the least mean error, in logs, over (ideal, measured) microseconds.

    Few points do not tell a floor from the size that they were measured at: no floor lies above
    `highest_us` then, what the kernels that are known better need at least.
    """
    times = sorted(us for _, us in points)
    if len(points) < ENOUGH:
        floor = min(times[0] * _BELOW[-1], highest_us)
        above = [math.sqrt(us * us - floor * floor) / ideal for ideal, us in points]
        return Curve(floor, statistics.median(above), len(points), source)
    best: tuple[float, Curve] | None = None
    for lowest in sorted({times[int((len(times) - 1) * share)] for share in _FLOORS}):
        for below in _BELOW:
            floor = lowest * below
            above = [
                math.sqrt(us * us - floor * floor) / ideal for ideal, us in points if us > _ABOVE * floor
            ]
            curve = Curve(floor, statistics.median(above) if len(above) > 1 else _USUAL, len(points), source)
            miss = sum(abs(math.log(us / curve.us(ideal))) for ideal, us in points)
            if best is None or miss < best[0]:
                best = (miss, curve)
    assert best is not None
    return best[1]
