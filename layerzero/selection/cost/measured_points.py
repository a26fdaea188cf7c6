"""Where measured calls stand to each other: octaves along the axes of their sizes and features.

Places that are compared make a crowd; what one of them says about a call is weighed by `selection.field`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from layerzero.perfdb import Site
from layerzero.perfdb.record import Launch
from layerzero.selection.cost.kriging import Triangle, factored, weighted
from layerzero.selection.key import grid

SQUARE = "square"

# So many places are weighed against each other; more are cut in two where they reach furthest.
CROWD = 192
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
# How far calls stand apart that differ in a feature; calls that differ in any other are not compared.
FEATURES = {"causal": 2.0, SQUARE: 1.0, "bias": 0.5}
# The half precision types are compared with each other; the other one counts as this far away.
SIBLING = {"float16": "bfloat16"}
SIBLING_OCTAVES = 0.5
# Another layout of the same call counts as this far away.
LAYOUT_OCTAVES = 0.5
# What does not change how long a kernel takes.
INVISIBLE = frozenset({"scale", "scale_not_positive", "rows_nonempty"})
_TIMELESS = INVISIBLE | {"gqa", "lse"}

Position = Mapping[str, float]


class Place:
    """One measured bucket: its call, its position in octaves, the roofs' time, and each kernel's time there.

    `times` are logs of microseconds at the grid point, `loads` each kernel's microseconds at full speed
    (`selection.load`), `offsets` how far its times lie off its curve over loads.
    """

    __slots__ = (
        "crowd",
        "estimates",
        "ideal",
        "launch",
        "loads",
        "offsets",
        "position",
        "site",
        "sources",
        "times",
    )

    def __init__(self, site: Site, launch: Launch, ideal: float) -> None:
        self.site = site
        self.launch = launch
        self.ideal = ideal
        self.position = position_of(site)
        self.times: dict[str, float] = {}
        self.loads: dict[str, float] = {}
        self.offsets: dict[str, float] = {}
        self.sources: dict[str, str] = {}
        self.estimates: list[float] = []  # by how much estimates miss here, as logs
        self.crowd: Crowd


class Crowd:
    """Places of one family that are weighed against each other."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self._axes = sorted({name for place in places for name in place.position})
        self._at = [[place.position.get(axis, 0.0) for axis in self._axes] for place in places]
        # Places of the kernels that are measured most first: the triangles of two kernels then begin alike.
        spread = [name for name, _ in Counter(k for p in places for k in p.offsets).most_common()]
        self._order = sorted(range(len(places)), key=lambda n: [k not in places[n].offsets for k in spread])
        self._triangles: dict[tuple[int, ...], Triangle] = {}
        self._weights: dict[str, list[float]] = {}

    def distances(self, position: Position) -> list[float]:
        """Octaves from a call to each place, as the crow flies."""
        here = [position.get(axis, 0.0) for axis in self._axes]
        beyond = math.hypot(*(size for axis, size in position.items() if axis not in self._axes))
        if beyond:
            return [math.hypot(beyond, math.dist(here, there)) for there in self._at]
        return [math.dist(here, there) for there in self._at]

    def weights(self, kernel: str) -> list[float]:
        """What each place adds to a kernel's offset; nothing where it was not measured. Computed once."""
        found = self._weights.get(kernel)
        if found is None:
            own = tuple(n for n in self._order if kernel in self.places[n].offsets)
            triangle = self._triangles.get(own)
            if triangle is None:
                triangle = self._triangles[own] = factored([self._at[n] for n in own], self._begun(own))
            found = [0.0] * len(self.places)
            weights = weighted(triangle, [self.places[n].offsets[kernel] for n in own])
            for n, weight in zip(own, weights, strict=True):
                found[n] = weight
            self._weights[kernel] = found
        return found

    def _begun(self, own: tuple[int, ...]) -> Triangle:
        """The rows that another kernel's triangle has in common with that of the places `own`."""
        longest: Triangle = []
        for places, triangle in list(self._triangles.items()):
            same = next((n for n, (a, b) in enumerate(zip(places, own, strict=False)) if a != b), None)
            shared = triangle[: min(len(places), len(own)) if same is None else same]
            longest = max(longest, shared, key=len)
        return longest


def features_of(site: Site) -> tuple[str, ...]:
    """What decides how long a kernel takes, beside sizes and types."""
    named = tuple(f for f in site.features if f not in _TIMELESS)
    dims = dict(site.dims)
    # A causal mask over as many keys as queries is another thing to most kernels than one that is offset.
    square = "causal" in named and grid(dims.get("Sq", 0)) == grid(dims.get("Sk", 0))
    return (*named, SQUARE) if square else named


def position_of(site: Site) -> dict[str, float]:
    """Where a call stands: octaves along the axes of its sizes, and what else tells it from its family."""
    octaves = {name: math.log2(max(grid(size), 1)) for name, size in site.dims}
    replaced, axes = AXES.get(site.op, _PLAIN)
    found = {name: WEIGHTS.get(name, 1.0) * far for name, far in octaves.items() if name not in replaced}
    for axis, exponents in axes.items():
        along = sum(exponent * octaves.get(name, 0.0) for name, exponent in exponents.items())
        found[axis] = WEIGHTS.get(axis, 1.0) * along
    if site.dtype in SIBLING:
        found["dtype"] = SIBLING_OCTAVES
    named = features_of(site)
    found |= {"with " + name: apart for name, apart in FEATURES.items() if name in named}
    shown = tuple(f for f in site.features if f not in INVISIBLE and f not in FEATURES)
    # Two layouts are two axes, so that any two stand equally far apart.
    found[f"layout {(site.layout, site.contiguous, shown)}"] = LAYOUT_OCTAVES / math.sqrt(2)
    return found


def crowds(places: list[Place]) -> list[Crowd]:
    """A family's crowds, noted in its places: one, or those of both halves of its longest axis."""
    if len(places) <= CROWD:
        crowd = Crowd(places)
        for place in places:
            place.crowd = crowd
        return [crowd]

    def along(axis: str) -> list[float]:
        return [place.position.get(axis, 0.0) for place in places]

    axes = sorted({name for place in places for name in place.position})
    axis = max(axes, key=lambda name: max(along(name)) - min(along(name)))
    ordered = sorted(places, key=lambda place: place.position.get(axis, 0.0))
    half = len(ordered) // 2
    return [*crowds(ordered[:half]), *crowds(ordered[half:])]
