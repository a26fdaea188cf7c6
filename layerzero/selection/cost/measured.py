"""Expected microseconds out of measurements: exact where the bucket was measured, interpolated near it.

Measurements keep exact sizes; a choice is priced for the key's grid point. A *place* is what was measured
in one bucket, for every kernel alike. Within a bucket a time is moved by what does not depend on the kernel
(the roofs at full speed), which keeps the order of the kernels as it was measured. Between places a kernel
follows its own curve (`selection.curve`: the floor of a launch, a multiple of the roofs), shifted by how far
the places around lie off it (`selection.field`); far from all of them the curve alone speaks.
Everything here is a pure function of the grid point, so a remembered choice equals a fresh one.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from operator import mul
from typing import Any

import msgspec

from layerzero._util import log
from layerzero.ops import table as ops_table
from layerzero.perfdb import Measurement, Site, plausible
from layerzero.perfdb.record import Launch
from layerzero.selection.cost.kriging import alike
from layerzero.selection.cost.latency_model import ENOUGH, Curve, fitted
from layerzero.selection.cost.measured_points import (
    FEATURES,
    INVISIBLE,
    SIBLING,
    Crowd,
    Place,
    Position,
    crowds,
    features_of,
    position_of,
)
from layerzero.selection.cost.roofline import MEASURED, ROOFLINE, SHIPPED, roofline_us
from layerzero.selection.cost.wave_quantization import load_us
from layerzero.selection.key import grid
from layerzero.spec.call_spec import Request, Work
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

__all__ = ["FAR", "MEASURED", "NEAR", "SHIPPED", "MeasuredCosts", "Row", "bucket_of", "request_of", "spot_of"]

NEAR = " nearby"
FAR = ", its curve"
ROWS_DISTRUSTED = "perfdb.rows_distrusted"


# Places further than this (in octaves of size) say nothing about a call.
RADIUS = 4.0
# At most so many say by how much estimates miss.
NEAREST = 10
MAX_PLACES = 2048
# What an estimate has to gain over measurements before it is believed: Efficiency values miss by about this.
ESTIMATE_MARGIN = 1.3
# The relative spread at which a row counts half; beyond `perfdb.record.MAX_SPREAD` it does not count.
STEADY = 0.1
# A row faster than this share of the roofs' time is a mistake, not a kernel: caches give less.
IMPOSSIBLE = 1 / 64
_HOST_US = 3.0

Family = tuple[Any, ...]


class Row(msgspec.Struct, frozen=True):
    """A measurement and where it comes from: `MEASURED` here, or `SHIPPED` with the package."""

    measurement: Measurement
    source: str


class _Around:
    """The places around one call: `near` those within the radius, nearest first."""

    __slots__ = ("_distances", "_likeness", "family", "near", "request")

    def __init__(self, request: Request, family: Family, here: Position, crowds: list[Crowd]) -> None:
        self.request = request
        self.family = family
        self._distances = {crowd: crowd.distances(here) for crowd in crowds}
        self._likeness: dict[Crowd, list[float]] = {}
        found = [pair for c, far in self._distances.items() for pair in zip(far, c.places, strict=True)]
        self.near = sorted((pair for pair in found if pair[0] <= RADIUS), key=lambda pair: pair[0])

    def shift(self, crowd: Crowd, kernel: str) -> float:
        """How far the kernel lies off its curve here."""
        likeness = self._likeness.get(crowd)
        if likeness is None:
            likeness = self._likeness[crowd] = [alike(distance) for distance in self._distances[crowd]]
        return math.fsum(map(mul, likeness, crowd.weights(kernel)))


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
        self._families: dict[Family, list[Place]] = {}
        self._curves: dict[tuple[Family, str], Curve] = {}
        self._floors: dict[Family, float] = {}
        self._ops: Counter[str] = Counter()
        self._digests: dict[str, str] = {}
        self._crowds: dict[Family, list[Crowd]] = {}
        self._last: dict[Launch, _Around] = {}
        self._spots: set[Hashable] = set()
        self.distrusted: Counter[str] = Counter()
        self.rows = 0
        self._build([row for row in rows if not without or spot_of(row.measurement) not in without], kernels)
        self._fit()
        if self.distrusted:
            why = "; ".join(f"{n} {why}" for why, n in self.distrusted.most_common())
            log.warning(
                ROWS_DISTRUSTED,
                rows=self.distrusted.total(),
                used=self.rows,
                why=why,
                remedy="lz tune --missing measures them again",
            )

    def fingerprint(self, op: str) -> Hashable:
        """Equal for two models that price every call of `op` alike; None where nothing of it was measured.

        A digest of all that prices follow from, so that models of two processes can be compared. Places stay
        in the order they were met: of two that are equally near, the first one speaks.
        """
        if not self._ops[op]:
            return None
        digest = self._digests.get(op)
        if digest is None:
            held = [
                (family, [(p.site, p.ideal, p.times, p.loads, p.sources, p.estimates) for p in places])
                for family, places in self._families.items()
                if family[0] == op
            ]
            body = msgspec.json.encode(held, order="deterministic")
            digest = self._digests[op] = hashlib.sha256(body).hexdigest()
        return digest

    def __call__(self, kernel: Kernel, work: Work, request: Request, hardware: Hardware) -> tuple[float, str]:
        """Microseconds of `kernel` for a request on the grid, and where they come from."""
        launches: tuple[Launch, ...] = (
            ("graph", "eager") if "capture" in request.modes else ("eager", "graph")
        )
        for launch in launches:
            around = self._near(request, launch)
            distance, own = next(((d, p) for d, p in around.near if kernel.id in p.times), (math.inf, None))
            if own is not None and distance == 0.0:
                return math.exp(own.times[kernel.id]), own.sources[kernel.id]
            curve = self._curves.get((around.family, kernel.id))
            if curve is not None and (own is not None or curve.places >= ENOUGH):
                us = curve.us(load_us(kernel, request, hardware, _roofs_us(work, request, hardware)))
                if own is None:
                    return us, curve.source + FAR
                return us * math.exp(around.shift(own.crowd, kernel.id)), curve.source + NEAR
        estimate = roofline_us(kernel, work, request, hardware)
        for launch in launches:
            around = self._near(request, launch)
            missed = [statistics.median(p.estimates) for _, p in around.near[:NEAREST]]
            if missed:
                estimate *= ESTIMATE_MARGIN * math.exp(statistics.median(missed))
                # Nobody was seen below the least floor: estimates leave the host's share out.
                return max(estimate, self._floors[around.family]), ROOFLINE
        return estimate, ROOFLINE

    def spot(self, kernel: str, request: Request) -> Hashable:
        """Where a kernel's measurement for a request stands (`spot_of` of its rows); None where none does."""
        launch = "graph" if "capture" in request.modes else "eager"
        found = _spot(kernel, Site.of(request), launch)
        return found if found in self._spots else None

    def places(self, op: str) -> list[tuple[Request, dict[str, float]]]:
        """Every measured bucket of an op as a request on the grid, with its kernels' microseconds."""
        found = []
        for family, places in self._families.items():
            if family[0] == op:
                for place in places:
                    request = request_of(place.site, self._hardware)
                    if place.launch == "graph":
                        request = request.replace(modes=frozenset({"capture"}))
                    found.append((request, {k: math.exp(us) for k, us in place.times.items()}))
        return found

    def _near(self, request: Request, launch: Launch) -> _Around:
        """What was measured around a call; kept until another call asks."""
        last = self._last.get(launch)
        if last is not None and last.request == request:
            return last
        site = Site.of(request)
        family = _family(site, launch)
        around = _Around(request, family, position_of(site), self._crowds.get(family, []))
        self._last[launch] = around
        return around

    def _build(self, rows: list[Row], kernels: Mapping[str, Kernel]) -> None:
        sites: dict[Site, tuple[Request, Work, float, Site]] = {}
        buckets: dict[tuple[Site, Launch], Place] = {}
        gathered: dict[tuple[int, str], list[tuple[float, float]]] = {}
        # The machine's own before what was shipped, newest first: the limit keeps those.
        rows.sort(key=lambda r: (r.source != MEASURED, -r.measurement.at))
        for row in rows:
            measured, kernel = row.measurement, kernels.get(row.measurement.kernel)
            if kernel is None or measured.site.op not in ops_table.FILES:
                continue
            why = plausible(measured)
            known_site = sites.get(measured.site)
            if known_site is None:
                request = request_of(measured.site, self._hardware)
                known_site = sites[measured.site] = (request, *self._roofs(request), bucket_of(measured.site))
            request, work, ideal, bucket = known_site
            if not why and measured.median_us < ideal * IMPOSSIBLE:
                why = "faster than the machine"
            if why:
                self.distrusted[why] += 1
                continue
            place = buckets.get((bucket, measured.launch))
            if place is None:
                family = _family(measured.site, measured.launch)
                if len(self._families.get(family, ())) >= MAX_PLACES:
                    continue
                _, there = self._roofs(request_of(bucket, self._hardware))
                place = buckets[(bucket, measured.launch)] = Place(bucket, measured.launch, there)
                self._families.setdefault(family, []).append(place)
            if kernel.id not in place.loads:
                at = request_of(bucket, self._hardware)
                place.loads[kernel.id] = load_us(kernel, at, self._hardware, place.ideal)
            known = place.sources.setdefault(kernel.id, row.source)
            if known == row.source:  # what the machine measured itself replaces what was shipped
                moved = (_HOST_US + place.ideal) / (_HOST_US + ideal)
                found = (math.log(measured.median_us * moved), _weight(measured))
                gathered.setdefault((id(place), kernel.id), []).append(found)
                missed = measured.median_us / roofline_us(kernel, work, request, self._hardware)
                place.estimates.append(math.log(missed))
                self._ops[request.op] += 1
                self._spots.add((kernel.id, measured.launch, bucket))
                self.rows += 1
        for place in buckets.values():
            for kernel_id in place.sources:
                # The median over the last tunes: one disturbed tune does not move a choice.
                place.times[kernel_id] = _middle(gathered[(id(place), kernel_id)][:5])

    def _roofs(self, request: Request) -> tuple[Work, float]:
        work = ops_table.get(request.op).work(request)
        return work, _roofs_us(work, request, self._hardware)

    def _fit(self) -> None:
        """Give every kernel its curve in every family, and every place its distance from it."""
        for family, places in self._families.items():
            points: dict[str, list[tuple[float, float]]] = {}
            for place in places:
                for kernel_id, us in place.times.items():
                    points.setdefault(kernel_id, []).append((place.loads[kernel_id], math.exp(us)))
            # Kernels that were measured in few places have a floor no higher than those of the others.
            highest = math.inf
            for kernel_id, own in sorted(points.items(), key=lambda known: -len(known[1])):
                sources = {p.sources[kernel_id] for p in places if kernel_id in p.sources}
                source = MEASURED if sources == {MEASURED} else SHIPPED
                curve = self._curves[(family, kernel_id)] = fitted(own, source, highest)
                if curve.places >= ENOUGH:
                    highest = min(highest, curve.floor_us)
                for place in places:
                    if kernel_id in place.times:
                        expected = curve.us(place.loads[kernel_id])
                        place.offsets[kernel_id] = place.times[kernel_id] - math.log(expected)
            self._floors[family] = min(self._curves[(family, k)].floor_us for k in points)
            self._crowds[family] = crowds(places)


def spot_of(row: Measurement) -> Hashable:
    """What a row is a measurement of: its kernel, and the bucket and launch of its call."""
    return _spot(row.kernel, row.site, row.launch)


def _spot(kernel: str, site: Site, launch: str) -> Hashable:
    return (kernel, launch, bucket_of(site))


def _family(site: Site, launch: Launch) -> Family:
    """What calls have in common that are compared at all."""
    kept = tuple(f for f in features_of(site) if f not in FEATURES)
    types = tuple(sorted({SIBLING.get(t, t) for t in site.dtypes}))
    return (site.op, SIBLING.get(site.dtype, site.dtype), types, kept, launch)


def bucket_of(site: Site) -> Site:
    """The site on the key's grid, without what does not change how long a kernel takes."""
    dims = tuple((name, grid(size)) for name, size in sorted(site.dims))
    shown = tuple(f for f in site.features if f not in INVISIBLE)
    return msgspec.structs.replace(site, dims=dims, features=shown)


def request_of(site: Site, hardware: Hardware) -> Request:
    """The call that was timed, as a request on `hardware`."""
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


def _roofs_us(work: Work, request: Request, hardware: Hardware) -> float:
    """What the roofs alone would need."""
    peak = hardware.peak_flops.get(request.dtype) or min(hardware.peak_flops.values(), default=1e9)
    return max(work.flops / peak, work.bytes / hardware.bandwidth, 1e-9) * 1e6


def _weight(row: Measurement) -> float:
    """How much a row counts beside others of its spot: half where it spreads by `STEADY`, then ever less."""
    spread = math.sqrt(row.variance) / row.median_us
    return 1.0 / (1.0 + (spread / STEADY) ** 2)


def _middle(found: Sequence[tuple[float, float]]) -> float:
    """The median of (value, weight) pairs; of two pairs the mean, since neither is the odd one out."""
    ordered = sorted(found)
    if len(ordered) == 2:
        total = sum(weight for _, weight in ordered)
        return sum(value * weight for value, weight in ordered) / total
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for position, (value, weight) in enumerate(ordered[:-1]):
        below += weight
        if math.isclose(below, half):
            return (value + ordered[position + 1][0]) / 2
        if below > half:
            return value
    return ordered[-1][0]
