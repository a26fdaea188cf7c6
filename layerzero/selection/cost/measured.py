"""Expected microseconds out of measurements: exact where the bucket was measured, interpolated near it.

Measurements keep exact sizes; a choice is priced for the key's grid point. A *point* is what was measured in
one bucket, for every kernel alike. Within a bucket a time is moved by what does not depend on the kernel (the
roofs at full speed), which keeps the order of the kernels as it was measured. Between points a kernel follows
its own `LatencyModel` (the floor of a launch, a multiple of the roofline), shifted by how far the points
around it are off that model (kriging); far from all of them the model alone counts. Everything here is a pure
function of the grid point, so a remembered choice equals a fresh one.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from layerzero._util import log
from layerzero.ops import table as ops_table
from layerzero.perfdb import BenchmarkCase, Measurement, implausible_reason
from layerzero.perfdb.record import Launch
from layerzero.selection.cost.kriging import Floats, covariance
from layerzero.selection.cost.latency_model import MIN_POINTS, LatencyModel, fit
from layerzero.selection.cost.measured_points import (
    FEATURES,
    SIBLING,
    MeasuredPoint,
    PointCluster,
    Position,
    features_of,
    position_of,
    split_clusters,
)
from layerzero.selection.cost.roofline import (
    ESTIMATE_MARGIN,
    MEASURED,
    ROOFLINE,
    SHIPPED,
    ideal_us,
    roofline_us,
)
from layerzero.selection.cost.wave_quantization import kernel_work_us
from layerzero.selection.key import INVISIBLE, grid
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

INTERPOLATED = ", interpolated"
EXTRAPOLATED = ", extrapolated"
ROWS_DISTRUSTED = "perfdb.rows_distrusted"


# Points further than this (in octaves of size) say nothing about a call.
RADIUS = 4.0
# At most so many say by how much estimates miss.
NEAREST = 10
MAX_POINTS = 2048
# The relative spread at which a row counts half; beyond `perfdb.record.MAX_SPREAD` it does not count.
HALF_WEIGHT_SPREAD = 0.1
# A row faster than this share of the roofs' time is a mistake, not a kernel: caches give less.
IMPOSSIBLE = 1 / 64
_HOST_US = 3.0

Family = tuple[Any, ...]


class SourcedMeasurement(msgspec.Struct, frozen=True):
    """A measurement and where it comes from: `MEASURED` here, or `SHIPPED` with the package."""

    measurement: Measurement
    source: str


class _Neighbourhood:
    """The points around one call: `near` those within the radius, nearest first."""

    __slots__ = ("_covariances", "_distances", "family", "near", "request")

    def __init__(
        self, request: CallSpec, family: Family, position: Position, clusters: list[PointCluster]
    ) -> None:
        self.request = request
        self.family = family
        self._distances = {crowd: crowd.distances(position) for crowd in clusters}
        self._covariances: dict[PointCluster, Floats] = {}
        pairs = [pair for c, far in self._distances.items() for pair in zip(far, c.points, strict=True)]
        self.near = sorted((pair for pair in pairs if pair[0] <= RADIUS), key=lambda pair: pair[0])

    def log_offset(self, cluster: PointCluster, kernel: str) -> float:
        """How far the kernel is off its latency model here, as a log."""
        covariances = self._covariances.get(cluster)
        if covariances is None:
            covariances = self._covariances[cluster] = covariance(self._distances[cluster])
        return float(covariances @ cluster.weights(kernel))


class MeasuredCosts:
    """A cost model over one device's measurements; falls back to the roofline, and says which it was."""

    def __init__(
        self,
        rows: Iterable[SourcedMeasurement],
        kernels: Mapping[str, Kernel],
        hardware: Hardware,
        excluded: Collection[Hashable] = (),
    ) -> None:
        self._hardware = hardware
        self._families: dict[Family, list[MeasuredPoint]] = {}
        self._models: dict[tuple[Family, str], LatencyModel] = {}
        self._floors: dict[Family, float] = {}
        self._op_counts: Counter[str] = Counter()
        self._digests: dict[str, str] = {}
        self._clusters: dict[Family, list[PointCluster]] = {}
        self._last: dict[Launch, _Neighbourhood] = {}
        self._keys: set[Hashable] = set()
        self._kernels = kernels
        self._trusted: list[SourcedMeasurement] = []
        self.distrusted: Counter[str] = Counter()
        self.rows = 0
        self._build(
            [row for row in rows if not excluded or measurement_key(row.measurement) not in excluded], kernels
        )
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

        A digest of all that prices follow from, so that models of two processes can be compared. Points stay
        in the order they were met: of two that are equally near, the first one counts.
        """
        if not self._op_counts[op]:
            return None
        digest = self._digests.get(op)
        if digest is None:
            points_by_family = [
                (family, [(p.case, p.ideal_us, p.times, p.work_us, p.sources, p.estimates) for p in points])
                for family, points in self._families.items()
                if family[0] == op
            ]
            body = msgspec.json.encode(points_by_family, order="deterministic")
            digest = self._digests[op] = hashlib.sha256(body).hexdigest()
        return digest

    def __call__(
        self, kernel: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware
    ) -> tuple[float, str]:
        """Microseconds of `kernel` for a request on the grid, and where they come from."""
        launches: tuple[Launch, ...] = ("graph", "eager")
        if "capture" not in request.modes:
            launches = launches[::-1]
        for launch in launches:
            neighbourhood = self._neighbourhood(request, launch)
            distance, nearest = next(
                ((d, p) for d, p in neighbourhood.near if kernel.id in p.times), (math.inf, None)
            )
            if nearest is not None and distance == 0.0:
                return math.exp(nearest.times[kernel.id]), nearest.sources[kernel.id]
            model = self._models.get((neighbourhood.family, kernel.id))
            if model is not None and (nearest is not None or model.point_count >= MIN_POINTS):
                us = model.us(kernel_work_us(kernel, request, hardware, ideal_us(work, request, hardware)))
                if nearest is None:
                    return us, model.source + EXTRAPOLATED
                us *= math.exp(neighbourhood.log_offset(nearest.cluster, kernel.id))
                return us, model.source + INTERPOLATED
        estimate = roofline_us(kernel, work, request, hardware)
        for launch in launches:
            neighbourhood = self._neighbourhood(request, launch)
            errors = [statistics.median(p.estimates) for _, p in neighbourhood.near[:NEAREST]]
            if errors:
                estimate *= ESTIMATE_MARGIN * math.exp(statistics.median(errors))
                # No kernel was seen below the least floor: estimates leave the host's share out.
                return max(estimate, self._floors[neighbourhood.family]), ROOFLINE
        return estimate, ROOFLINE

    def key_of(self, kernel: str, request: CallSpec) -> Hashable:
        """Where a kernel's measurement for a request is (`measurement_key` of its rows); None without any."""
        launch = "graph" if "capture" in request.modes else "eager"
        key = _key(kernel, BenchmarkCase.of_request(request), launch)
        return key if key in self._keys else None

    def without(self, keys: Collection[Hashable]) -> MeasuredCosts:
        """The model that these measurements give without those under some of `key_of`'s keys."""
        return MeasuredCosts(self._trusted, self._kernels, self._hardware, keys)

    def measured_buckets(self, op: str) -> list[tuple[CallSpec, dict[str, float]]]:
        """Every measured bucket of an op as a request on the grid, with its kernels' microseconds."""
        buckets = []
        for family, points in self._families.items():
            if family[0] == op:
                for point in points:
                    request = request_of(point.case, self._hardware)
                    if point.launch == "graph":
                        request = request.replace(modes=frozenset({"capture"}))
                    buckets.append((request, {k: math.exp(us) for k, us in point.times.items()}))
        return buckets

    def _neighbourhood(self, request: CallSpec, launch: Launch) -> _Neighbourhood:
        """What was measured around a call; kept until another call asks."""
        last = self._last.get(launch)
        if last is not None and last.request == request:
            return last
        case = BenchmarkCase.of_request(request)
        family = _family(case, launch)
        neighbourhood = _Neighbourhood(request, family, position_of(case), self._clusters.get(family, []))
        self._last[launch] = neighbourhood
        return neighbourhood

    def _build(self, rows: list[SourcedMeasurement], kernels: Mapping[str, Kernel]) -> None:
        cases: dict[BenchmarkCase, tuple[CallSpec, WorkEstimate, float, BenchmarkCase]] = {}
        points: dict[tuple[BenchmarkCase, Launch], MeasuredPoint] = {}
        times: dict[tuple[int, str], list[tuple[float, float]]] = {}
        # The machine's own before what was shipped, newest first: the limit keeps those.
        rows.sort(key=lambda r: (r.source != MEASURED, -r.measurement.timestamp))
        for row in rows:
            measured, kernel = row.measurement, kernels.get(row.measurement.kernel)
            if kernel is None or measured.case.op not in ops_table.FILES:
                continue
            why = implausible_reason(measured)
            known_case = cases.get(measured.case)
            if known_case is None:
                request = request_of(measured.case, self._hardware)
                known_case = cases[measured.case] = (request, *self._ideal(request), bucket_of(measured.case))
            request, work, ideal_us, bucket = known_case
            if not why and measured.median_us < ideal_us * IMPOSSIBLE:
                why = "faster than the machine"
            if why:
                self.distrusted[why] += 1
                continue
            point = points.get((bucket, measured.launch))
            if point is None:
                family = _family(measured.case, measured.launch)
                if len(self._families.get(family, ())) >= MAX_POINTS:
                    continue
                _, bucket_us = self._ideal(request_of(bucket, self._hardware))
                point = points[(bucket, measured.launch)] = MeasuredPoint(bucket, measured.launch, bucket_us)
                self._families.setdefault(family, []).append(point)
            if kernel.id not in point.work_us:
                bucket_request = request_of(bucket, self._hardware)
                work_us = kernel_work_us(kernel, bucket_request, self._hardware, point.ideal_us)
                point.work_us[kernel.id] = work_us
            source = point.sources.setdefault(kernel.id, row.source)
            if source == row.source:  # what the machine measured itself replaces what was shipped
                scale = (_HOST_US + point.ideal_us) / (_HOST_US + ideal_us)
                weighted_time = (math.log(measured.median_us * scale), _weight(measured))
                times.setdefault((id(point), kernel.id), []).append(weighted_time)
                error = measured.median_us / roofline_us(kernel, work, request, self._hardware)
                point.estimates.append(math.log(error))
                self._op_counts[request.op] += 1
                self._keys.add((kernel.id, measured.launch, bucket))
                self._trusted.append(row)
                self.rows += 1
        for point in points.values():
            for kernel_id in point.sources:
                # The median over the last tunes: one disturbed tune does not move a choice.
                point.times[kernel_id] = _weighted_median(times[(id(point), kernel_id)][:5])

    def _ideal(self, request: CallSpec) -> tuple[WorkEstimate, float]:
        work = ops_table.get(request.op).work(request)
        return work, ideal_us(work, request, self._hardware)

    def _fit(self) -> None:
        """Fit every kernel's latency model in every family, and note each point's offset from it."""
        for family, points in self._families.items():
            by_kernel: dict[str, list[tuple[float, float]]] = {}
            for point in points:
                for kernel_id, us in point.times.items():
                    by_kernel.setdefault(kernel_id, []).append((point.work_us[kernel_id], math.exp(us)))
            # Kernels that were measured at few points have a floor no higher than those of the others.
            highest_us = math.inf
            for kernel_id, times in sorted(by_kernel.items(), key=lambda known: -len(known[1])):
                sources = {p.sources[kernel_id] for p in points if kernel_id in p.sources}
                source = MEASURED if sources == {MEASURED} else SHIPPED
                model = self._models[(family, kernel_id)] = fit(times, source, highest_us)
                if model.point_count >= MIN_POINTS:
                    highest_us = min(highest_us, model.floor_us)
                for point in points:
                    if kernel_id in point.times:
                        expected = model.us(point.work_us[kernel_id])
                        point.offsets[kernel_id] = point.times[kernel_id] - math.log(expected)
            self._floors[family] = min(self._models[(family, k)].floor_us for k in by_kernel)
            self._clusters[family] = split_clusters(points)


def measurement_key(row: Measurement) -> Hashable:
    """What a row is a measurement of: its kernel, and the bucket and launch of its call."""
    return _key(row.kernel, row.case, row.launch)


def _key(kernel: str, case: BenchmarkCase, launch: str) -> Hashable:
    return (kernel, launch, bucket_of(case))


def _family(case: BenchmarkCase, launch: Launch) -> Family:
    """What calls have in common that are compared at all."""
    features = tuple(f for f in features_of(case) if f not in FEATURES)
    types = tuple(sorted({SIBLING.get(t, t) for t in case.dtypes}))
    return (case.op, SIBLING.get(case.dtype, case.dtype), types, features, launch)


def bucket_of(case: BenchmarkCase) -> BenchmarkCase:
    """The case on the key's grid, without what does not change how long a kernel takes."""
    dims = tuple((name, grid(size)) for name, size in sorted(case.dims))
    shown = tuple(f for f in case.features if f not in INVISIBLE)
    return msgspec.structs.replace(case, dims=dims, features=shown)


def request_of(case: BenchmarkCase, hardware: Hardware) -> CallSpec:
    """The call that was timed, as a request on `hardware`."""
    return CallSpec(
        op=case.op,
        platform=hardware.platform,
        device=hardware.device,
        dtype=case.dtype,
        dtypes=case.dtypes,
        dims=dict(case.dims),
        features=frozenset(case.features),
        layout=case.layout,
        contiguous=case.contiguous,
    )


def _weight(row: Measurement) -> float:
    """How much a row counts beside others of its key: half at `HALF_WEIGHT_SPREAD`, then ever less."""
    spread = math.sqrt(row.variance) / row.median_us
    return 1.0 / (1.0 + (spread / HALF_WEIGHT_SPREAD) ** 2)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """The median of (value, weight) pairs; of two pairs the mean, since neither is the odd one out."""
    ordered = sorted(pairs)
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
