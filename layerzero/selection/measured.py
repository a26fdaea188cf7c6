"""Expected microseconds out of measurements: exact where the bucket was measured, interpolated near it.

Measurements keep exact sizes; a choice is priced for the key's grid point. A *place* is what was measured
in one bucket, for every kernel alike. A kernel's time is held as a multiple of a time that does not depend on
the kernel (the roofs at full speed), so that moving a measurement within its bucket keeps the order of the
kernels as it was measured. Between places the multiples are averaged in log space over the nearest ones.
Everything here is a pure function of the grid point, so a remembered choice equals a fresh one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from layerzero import log
from layerzero.hardware import Hardware
from layerzero.kernel import Kernel
from layerzero.ops import table as ops_table
from layerzero.ops.request import Request, Work
from layerzero.perfdb import Measurement, Site, plausible
from layerzero.selection.cost import ROOFLINE, roofline_us
from layerzero.selection.key import grid

MEASURED = "measured"
SHIPPED = "shipped table"
NEAR = " nearby"
ROWS_DISTRUSTED = "perfdb.rows_distrusted"

# Places further than this (in octaves of size) say nothing about a call, and at most this many are averaged.
RADIUS = 4.0
NEAREST = 4
# How much an octave along an axis tells kernels apart; found by leaving out one of 74 attention shapes on an
# H200 in turn. Group size repeats the heads, and the value head size nearly always the head size.
WEIGHTS = {"D": 1.5, "G": 0.5, "Dv": 0.25}
# The other half precision type, where nothing of a call's own was measured, counts as this far away.
SIBLING = {"bfloat16": "float16", "float16": "bfloat16"}
SIBLING_OCTAVES = 0.5
MAX_PLACES = 2048
# What an estimate has to gain over measurements before it is believed: Efficiency values miss by about this.
ESTIMATE_MARGIN = 1.3
# The relative spread at which a row counts half; beyond `perfdb.record.MAX_SPREAD` it does not count.
STEADY = 0.1
# A row faster than this share of the roofs' time is a mistake, not a kernel: caches give less.
IMPOSSIBLE = 1 / 64
# What does not change how long a kernel takes.
_INVISIBLE = frozenset({"scale", "rows_nonempty"})
_TIMELESS = _INVISIBLE | {"gqa", "lse"}
_HOST_US = 3.0

Class = tuple[Any, ...]


class Row(msgspec.Struct, frozen=True):
    """A measurement and where it comes from: `MEASURED` here, or `SHIPPED` with the package."""

    measurement: Measurement
    source: str


class _Place:
    """One measured bucket: its position in octaves, and by kernel the log of its multiple and the source."""

    __slots__ = ("bucket", "estimates", "flags", "position", "ratios", "sources")

    def __init__(self, bucket: tuple[tuple[str, int], ...], flags: tuple[str, bool, tuple[str, ...]]) -> None:
        self.bucket = bucket
        self.flags = flags
        self.position = _position(bucket)
        self.ratios: dict[str, float] = {}
        self.sources: dict[str, str] = {}
        self.estimates: list[float] = []  # by how much estimates miss here, as logs


class MeasuredCosts:
    """A cost model over one device's measurements; falls back to the roofline, and says which it was."""

    def __init__(
        self,
        rows: Iterable[Row],
        kernels: Mapping[str, Kernel],
        hardware: Hardware,
        without: Collection[Hashable] = (),
    ) -> None:
        self._hardware = hardware
        self._classes: dict[Class, list[_Place]] = {}
        self._ops: Counter[str] = Counter()
        self._last: tuple[Request, list[tuple[float, _Place]]] | None = None
        self._spots: set[Hashable] = set()
        self.distrusted: Counter[str] = Counter()
        self.rows = 0
        self._build([row for row in rows if spot_of(row.measurement) not in without], kernels)
        if self.distrusted:
            why = "; ".join(f"{n} {why}" for why, n in self.distrusted.most_common())
            log.warning(ROWS_DISTRUSTED, rows=self.distrusted.total(), used=self.rows, why=why)

    def fingerprint(self, op: str) -> Hashable:
        """Equal for two models that price every call of `op` alike; None where nothing of it was measured."""
        return (id(self), self._ops[op]) if self._ops[op] else None

    def __call__(self, kernel: Kernel, work: Work, request: Request, hardware: Hardware) -> tuple[float, str]:
        """Microseconds of `kernel` for a request on the grid, and where they come from."""
        estimate = roofline_us(kernel, work, request, hardware)
        near = self._near(request)
        if not near:
            return estimate, ROOFLINE
        own = [(distance, place) for distance, place in near if kernel.id in place.ratios][:NEAREST]
        if own:
            distance, place = own[0]
            ratio = _blend([(d, p.ratios[kernel.id]) for d, p in own])
            source = place.sources[kernel.id]
            return _ideal_us(work, request, hardware) * math.exp(ratio), source + (NEAR if distance else "")
        missed = [(d, statistics.median(p.estimates)) for d, p in near[:NEAREST] if p.estimates]
        if missed:
            estimate *= ESTIMATE_MARGIN * math.exp(_blend(missed))
        return estimate, ROOFLINE

    def spot(self, kernel: str, request: Request) -> Hashable:
        """Where a kernel's measurement for a request stands (`spot_of` of its rows); None where none does."""
        launch = "graph" if "capture" in request.modes else "eager"
        found = _spot(kernel, Site.of(request), launch)
        return found if found in self._spots else None

    def places(self, op: str) -> list[tuple[Request, dict[str, float]]]:
        """Every measured bucket of an op as a request on the grid, with its kernels' microseconds."""
        found = []
        for key, places in self._classes.items():
            if key[0] == op:
                for place in places:
                    request = _request(key, place, self._hardware)
                    ideal = _ideal_us(ops_table.get(op).work(request), request, self._hardware)
                    found.append((request, {k: ideal * math.exp(r) for k, r in place.ratios.items()}))
        return found

    def _near(self, request: Request) -> list[tuple[float, _Place]]:
        """The places within the radius, nearest first; the exact bucket alone where every kernel is in it."""
        last = self._last
        if last is not None and last[0] == request:
            return last[1]
        found: list[tuple[float, _Place]] = []
        site = Site.of(request)
        for launch in ("graph", "eager") if "capture" in request.modes else ("eager", "graph"):
            found = self._within(request, self._classes.get(_class(site, launch), ()), 0.0)
            if not found and request.dtype in SIBLING:
                other = _class(_sibling(site), launch)
                found = self._within(request, self._classes.get(other, ()), SIBLING_OCTAVES)
            if found:
                break
        self._last = (request, found)
        return found

    def _within(self, request: Request, places: Sequence[_Place], away: float) -> list[tuple[float, _Place]]:
        here = _position((name, grid(size)) for name, size in request.dims.items())
        flags = _flags(Site.of(request))
        found = [
            (distance + away, place)
            for place in places
            if (distance := _distance(here, place.position, flags == place.flags)) <= RADIUS
        ]
        found.sort(key=lambda pair: pair[0])
        return found

    def _build(self, rows: list[Row], kernels: Mapping[str, Kernel]) -> None:
        buckets: dict[tuple[Class, Hashable, tuple[tuple[str, int], ...]], _Place] = {}
        gathered: dict[tuple[int, str], list[tuple[float, float]]] = {}
        # The machine's own before what was shipped, newest first: the limit keeps those.
        rows.sort(key=lambda r: (r.source != MEASURED, -r.measurement.at))
        for row in rows:
            measured, kernel = row.measurement, kernels.get(row.measurement.kernel)
            if kernel is None or measured.site.op not in ops_table.FILES:
                continue
            why = plausible(measured)
            request = _of_site(measured.site, self._hardware)
            ideal = _ideal_us(ops_table.get(request.op).work(request), request, self._hardware)
            if not why and measured.median_us < ideal * IMPOSSIBLE:
                why = "faster than the machine"
            if why:
                self.distrusted[why] += 1
                continue
            key = _class(measured.site, measured.launch)
            flags = _flags(measured.site)
            bucket = tuple((name, grid(size)) for name, size in measured.site.dims)
            place = buckets.get((key, flags, bucket))
            if place is None:
                if len(self._classes.get(key, ())) >= MAX_PLACES:
                    continue
                place = buckets[(key, flags, bucket)] = _Place(bucket, flags)
                self._classes.setdefault(key, []).append(place)
            known = place.sources.setdefault(kernel.id, row.source)
            if known == row.source:  # what the machine measured itself replaces what was shipped
                found = (math.log(measured.median_us / ideal), _weight(measured))
                gathered.setdefault((id(place), kernel.id), []).append(found)
                missed = measured.median_us / roofline_us(
                    kernel, ops_table.get(request.op).work(request), request, self._hardware
                )
                place.estimates.append(math.log(missed))
                self._ops[request.op] += 1
                self._spots.add(spot_of(measured))
                self.rows += 1
        for place in buckets.values():
            for kernel_id in place.sources:
                # The median over the last tunes: one disturbed tune does not move a choice.
                place.ratios[kernel_id] = _middle(gathered[(id(place), kernel_id)][:5])


def spot_of(row: Measurement) -> Hashable:
    """What a row is a measurement of: its kernel, and the bucket and launch of its call."""
    return _spot(row.kernel, row.site, row.launch)


def _spot(kernel: str, site: Site, launch: str) -> Hashable:
    bucket = tuple((name, grid(size)) for name, size in sorted(site.dims))
    return (kernel, _class(site, launch), _flags(site), bucket)


def _class(site: Site, launch: str) -> Class:
    features = tuple(f for f in site.features if f not in _TIMELESS)
    dims = dict(site.dims)
    # A causal mask over as many keys as queries is another thing to most kernels than one that is offset.
    square = "causal" in features and grid(dims.get("Sq", 0)) == grid(dims.get("Sk", 0))
    return (site.op, site.dtype, site.dtypes, features, launch, square)


def _sibling(site: Site) -> Site:
    names = [SIBLING.get(dtype, dtype) for dtype in site.dtypes]
    return msgspec.structs.replace(site, dtype=SIBLING[site.dtype], dtypes=tuple(sorted(names)))


def _of_site(site: Site, hardware: Hardware) -> Request:
    return Request(
        op=site.op,
        platform=hardware.platform,
        device=hardware.device,
        dtype=site.dtype,
        dtypes=site.dtypes,
        dims=dict(site.dims),
        features=frozenset(site.features),
        layout=site.layout,
        contiguous=site.contiguous,
    )


def _flags(site: Site) -> tuple[str, bool, tuple[str, ...]]:
    """What two calls of one class may differ in, at a price in distance."""
    return (site.layout, site.contiguous, tuple(f for f in site.features if f not in _INVISIBLE))


def _request(key: Class, place: _Place, hardware: Hardware) -> Request:
    op, dtype, dtypes, _, launch, _ = key
    layout, contiguous, features = place.flags
    site = Site(
        op=op, dtype=dtype, dtypes=dtypes, features=features, layout=layout, contiguous=contiguous,
        dims=place.bucket,
    )  # fmt: skip
    request = _of_site(site, hardware)
    return request.replace(modes=frozenset({"capture"})) if launch == "graph" else request


def _ideal_us(work: Work, request: Request, hardware: Hardware) -> float:
    """What the roofs alone would need, plus one launch: the unit that kernels' times are held in."""
    peak = hardware.peak_flops.get(request.dtype) or min(hardware.peak_flops.values(), default=1e9)
    return _HOST_US + max(work.flops / peak, work.bytes / hardware.bandwidth) * 1e6


def _position(bucket: Iterable[tuple[str, int]]) -> dict[str, float]:
    return {name: math.log2(max(size, 1)) for name, size in bucket}


def _distance(here: Mapping[str, float], there: Mapping[str, float], same_flags: bool) -> float:
    """Octaves between two sizes, as the crow flies; another layout counts as half an octave."""
    total = 0.0 if same_flags else 0.25
    for name, size in here.items():
        step = size - there.get(name, size)
        if step:
            step *= WEIGHTS.get(name, 1.0)
            total += step * step
    return math.sqrt(total)


def _weight(row: Measurement) -> float:
    """How much a row counts beside others of its spot: half where it spreads by `STEADY`, then ever less."""
    spread = math.sqrt(row.variance) / row.median_us
    return 1.0 / (1.0 + (spread / STEADY) ** 2)


def _middle(found: Sequence[tuple[float, float]]) -> float:
    """The median of (value, weight) pairs; between two values where both halves weigh the same."""
    ordered = sorted(found)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for position, (value, weight) in enumerate(ordered[:-1]):
        below += weight
        if math.isclose(below, half):
            return (value + ordered[position + 1][0]) / 2
        if below > half:
            return value
    return ordered[-1][0]


def _blend(found: Sequence[tuple[float, float]]) -> float:
    """The average of values, the nearest by far the heaviest; the value itself at distance zero."""
    if found[0][0] == 0.0:
        return found[0][1]
    weights = [distance**-4 for distance, _ in found]
    return sum(w * value for w, (_, value) in zip(weights, found, strict=True)) / sum(weights)
