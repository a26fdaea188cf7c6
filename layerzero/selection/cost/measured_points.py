"""Distances between measured calls: octaves along the axes of their sizes and features.

Points that are compared make a cluster; `kriging` weighs what each of them says about a call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from layerzero.perfdb import BenchmarkCase
from layerzero.perfdb.record import Launch
from layerzero.selection.cost.kriging import Floats, covariance_matrix
from layerzero.selection.key import INVISIBLE, grid

SQUARE = "square"

# So many points are weighed against each other; more are cut in two along their longest axis.
MAX_CLUSTER = 192
# How much an octave along an axis tells kernels apart. The value head size nearly always repeats the head
# size, a pool's pages its sequences. All were set by leaving out one bucket in turn.
WEIGHTS = {"D": 1.6, "G": 0.5, "Dv": 0.25, "P": 0.5, "N pages": 0.05, "B / Hq": 0.3}
# Axes that say more than a size itself, by the exponents of their sizes, and the sizes that they stand for:
# pages of a sequence count as its tokens; attention spreads over sequences and heads alike, and the heads of
# keys follow from heads and group.
Axes = Mapping[str, Mapping[str, int]]
AXES: Mapping[str, tuple[frozenset[str], Axes]] = {
    "paged_attention": (frozenset("MN"), {"M": {"M": 1, "P": 1}, "N pages": {"N": 1}}),
    "attention": (frozenset({"B", "Hq", "Hk"}), {"B Hq": {"B": 1, "Hq": 1}, "B / Hq": {"B": 1, "Hq": -1}}),
}
_PLAIN: tuple[frozenset[str], Axes] = (frozenset(), {})
# The distance of calls that differ in a feature; calls that differ in any other are not compared.
FEATURES = {"causal": 2.0, SQUARE: 1.0, "bias": 0.5}
# The half precision types are compared with each other; the other one counts as this far away.
SIBLING = {"float16": "bfloat16"}
SIBLING_OCTAVES = 0.5
# Another layout of the same call counts as this far away.
LAYOUT_OCTAVES = 0.5
_TIMELESS = INVISIBLE | {"gqa", "lse"}

Position = Mapping[str, float]


@dataclass(eq=False)
class MeasuredPoint:
    """One measured bucket: its call, its position in octaves, the roofline's time, each kernel's time.

    `times` are logs of microseconds at the grid point, `work_us` each kernel's microseconds at full speed
    (`wave_quantization`), `offsets` how far its times are off its latency model.
    """

    case: BenchmarkCase
    launch: Launch
    ideal_us: float
    times: dict[str, float] = field(default_factory=dict)
    work_us: dict[str, float] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    estimates: list[float] = field(default_factory=list)  # by how much estimates miss here, as logs
    position: Position = field(init=False)
    cluster: PointCluster = field(init=False)

    def __post_init__(self) -> None:
        self.position = position_of(self.case)


class PointCluster:
    """Points of one family that are weighed against each other."""

    def __init__(self, points: list[MeasuredPoint]) -> None:
        self.points = points
        self._axes = sorted({name for point in points for name in point.position})
        self._coordinates = [[point.position.get(axis, 0.0) for axis in self._axes] for point in points]
        self._weights: dict[str, Floats] = {}

    def distances(self, position: Position) -> list[float]:
        """Octaves from a call to each point, in a straight line."""
        coordinates = [position.get(axis, 0.0) for axis in self._axes]
        beyond = math.hypot(*(size for axis, size in position.items() if axis not in self._axes))
        return [math.hypot(beyond, math.dist(coordinates, other)) for other in self._coordinates]

    @cached_property
    def _covariances(self) -> Floats:
        return covariance_matrix(self._coordinates)

    def weights(self, kernel: str) -> Floats:
        """What each point adds to a kernel's offset: nothing where it was not measured. Computed once."""
        weights = self._weights.get(kernel)
        if weights is None:
            indices = [n for n, point in enumerate(self.points) if kernel in point.offsets]
            offsets = [self.points[n].offsets[kernel] for n in indices]
            weights = np.zeros(len(self.points))
            weights[indices] = np.linalg.solve(self._covariances[np.ix_(indices, indices)], offsets)
            self._weights[kernel] = weights
        return weights


def features_of(case: BenchmarkCase) -> tuple[str, ...]:
    """What decides how long a kernel takes, beside sizes and types."""
    named = tuple(f for f in case.features if f not in _TIMELESS)
    dims = dict(case.dims)
    # A causal mask over as many keys as queries is another thing to most kernels than one that is offset.
    square = "causal" in named and grid(dims.get("Sq", 0)) == grid(dims.get("Sk", 0))
    return (*named, SQUARE) if square else named


def position_of(case: BenchmarkCase) -> dict[str, float]:
    """The position of a call: octaves along the axes of its sizes, and what else tells it from its family."""
    octaves = {name: math.log2(max(grid(size), 1)) for name, size in case.dims}
    replaced, axes = AXES.get(case.op, _PLAIN)
    position = {name: WEIGHTS.get(name, 1.0) * far for name, far in octaves.items() if name not in replaced}
    for axis, exponents in axes.items():
        along = sum(exponent * octaves.get(name, 0.0) for name, exponent in exponents.items())
        position[axis] = WEIGHTS.get(axis, 1.0) * along
    if case.dtype in SIBLING:
        position["dtype"] = SIBLING_OCTAVES
    named = features_of(case)
    position |= {"with " + name: apart for name, apart in FEATURES.items() if name in named}
    shown = tuple(f for f in case.features if f not in INVISIBLE and f not in FEATURES)
    # Two layouts are two axes, so that any two are equally far apart.
    position[f"layout {(case.layout, case.contiguous, shown)}"] = LAYOUT_OCTAVES / math.sqrt(2)
    return position


def split_clusters(points: list[MeasuredPoint]) -> list[PointCluster]:
    """A family's clusters, noted in its points: one, or those of both halves of its longest axis."""
    if len(points) <= MAX_CLUSTER:
        cluster = PointCluster(points)
        for point in points:
            point.cluster = cluster
        return [cluster]

    def along(axis: str) -> list[float]:
        return [place.position.get(axis, 0.0) for place in points]

    axes = sorted({name for place in points for name in place.position})
    axis = max(axes, key=lambda name: max(along(name)) - min(along(name)))
    ordered = sorted(points, key=lambda place: place.position.get(axis, 0.0))
    half = len(ordered) // 2
    return [*split_clusters(ordered[:half]), *split_clusters(ordered[half:])]
